"""The engine: SGLang with our plugin inside, and the preparation of what it loads. The only package that knows SGLang and torch."""

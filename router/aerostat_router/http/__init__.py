"""The router's HTTP/1.1 data path: bytes in, one decision by a handler, bytes out, with no task or future per request.

Moving tokens is what the router exists for, so this is a protocol of our own (uvloop, httptools) on both sides instead of a framework.
What is never in here: models, sessions, leases, routing policy, JSON of a request. A handler decides; this package reads, forwards,
passes through, limits, times out and counts. Everything runs in one event loop; nothing here is safe to call from another thread.

    front.Front ─▶ request_reader ─▶ Handler.handle(exchange) ─▶ exchange.reply | exchange.forward
                                                                        └▶ upstream.Pool.stream_call ─▶ response_reader ─▶ exchange
"""

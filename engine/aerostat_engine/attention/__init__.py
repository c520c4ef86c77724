"""CPU attention whose cost follows the new tokens. `paged` is the arithmetic (torch only), `backend` its SGLang adapter."""

from __future__ import annotations

BACKEND_NAME = "aerostat_paged"

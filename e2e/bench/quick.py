"""`make bench-quick`: is the first light fast? Our attention against stock, our router against a plain aiohttp proxy.

python e2e/bench/quick.py [--model-cache DIR]     (QUICK=1: fewer runs)
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import engine_speed
import router_proxy
from report import Report, Target, is_quick, progress

TARGETS = (
    Target(key="cached_prompt_ratio", bound=0.05, at_most=True),
    Target(key="decode_b1_vs_stock", bound=0.95, at_most=False),
    Target(key="decode_b16_vs_stock", bound=1.5, at_most=False),
    Target(key="router_vs_aiohttp_latency", bound=0.75, at_most=True),
    Target(key="router_rps_vs_aiohttp", bound=1.5, at_most=False),
)


async def run(cache: Path) -> None:
    engines = engine_speed.QUICK if is_quick() else engine_speed.FULL
    report = Report(bench="quick", runs=engines.runs, targets=TARGETS)
    proxies = await router_proxy.measure(router_proxy.QUICK if is_quick() else router_proxy.FULL, progress)
    report.figures |= proxies["figures"]
    report.spread |= proxies["spread"]
    report.baseline |= proxies["baseline"]
    with tempfile.TemporaryDirectory(prefix="aerostat-bench-") as run_dir:
        await engine_speed.measure(report, cache, Path(run_dir), engines)
    report.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-cache", type=Path, default=Path.home() / ".cache/aerostat/models")
    asyncio.run(run(parser.parse_args().model_cache))


if __name__ == "__main__":
    main()

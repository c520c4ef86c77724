"""The operator as a process in a cluster: settings, signals, the exit code."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Final

from aerostat_core.errors import PermanentError, SettingError
from aerostat_operator.replica import Replica
from aerostat_operator.settings import Settings, parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.logs import set_up_logs
from aerostat_runtime.process import die_with_parent

EXIT_FAILED: Final = 1
EXIT_BAD_SETTING: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv)
        set_up_logs(settings.log_level.upper())
        logging.getLogger("kopf").setLevel(logging.ERROR)  # it is restarted where it fails, and that is logged here
        if settings.die_with_parent is not None:
            die_with_parent(settings.die_with_parent)
        asyncio.run(_run(settings))
    except SettingError as error:
        sys.stderr.write(f"aerostat_operator: {error.message}\n")
        return EXIT_BAD_SETTING
    except PermanentError as error:
        sys.stderr.write(f"aerostat_operator: {error.message}\n")
        return EXIT_FAILED
    return 0


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await Replica(settings, SystemClock()).run(stop)

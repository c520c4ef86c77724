"""Between the keeper's values and the frames of `agent.proto`."""

import os
from contextlib import suppress
from pathlib import Path

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent.keeper.processes import Process
from aerostat_agent.site import EngineSite
from aerostat_core.ids import Bytes, Epoch


def process_info(process: Process) -> pb.ProcessInfo:
    return pb.ProcessInfo(
        epoch=process.epoch,
        pid=process.pid,
        running=not process.is_gone,
        exit_code=process.exit_code or 0,
        note=process.note,
        log_path=str(process.log_path),
        started_at=process.started_at,
    )


def exited(process: Process) -> pb.KeeperReply:
    return pb.KeeperReply(exited=pb.ProcessExited(epoch=process.epoch, exit_code=process.exit_code or 0))


def attached(agent_epoch: Epoch, keeper_epoch: Epoch, site: EngineSite) -> pb.KeeperReply:
    told = pb.Attached(agent_epoch=agent_epoch, keeper_epoch=keeper_epoch, engine_host=site.host, tls_dir=site.tls_dir or "")
    return pb.KeeperReply(attached=told)


def devices() -> pb.DeviceList:
    """The CPU device. Its capacity is a setting of the Pool, so it has no bytes of its own."""
    return pb.DeviceList(devices=[pb.DeviceInfo(uuid="cpu-0", kind="CPU")], host_memory_bytes=_host_memory_bytes())


def _host_memory_bytes() -> Bytes:
    """What this container may use: the machine's memory, or its control group's limit where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max", or no control groups of version 2 here
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine

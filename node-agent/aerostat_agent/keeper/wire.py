"""Between the keeper's values and the frames of `agent.proto`."""

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent.keeper.container import memory_of_container
from aerostat_agent.keeper.processes import Process
from aerostat_agent.site import EngineSite
from aerostat_core.ids import Epoch


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
    memory = memory_of_container()
    cpu = pb.DeviceInfo(uuid="cpu-0", kind="CPU")
    return pb.DeviceList(devices=[cpu], host_memory_bytes=memory.limit, shared_memory_bytes=memory.shared)

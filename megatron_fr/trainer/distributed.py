"""Process groups of Megatron-Core, for ranks that torchrun, Slurm or MPI started, or for a single process."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError, MissingExtraError, needs_extra
from megatron_fr.runtime.console import say_what_is_awaited
from megatron_fr.runtime.device import Device, prepare_process
from megatron_fr.runtime.ports import free_port


@dataclass(frozen=True)
class RankInfo:
    """Place of one rank in the world, and the address at which ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def bootstrap(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the variables of torchrun, of a Slurm step, or of MPI; without any, the world has one rank.

    Raises:
        ConfigError: torchrun's variables are incomplete, or MPI ranks cannot agree on an address.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        if missing := " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ):
            raise ConfigError(f"RANK and WORLD_SIZE are set, but {missing} not; start ranks with torchrun")
        rank, size, local = environ["RANK"], environ["WORLD_SIZE"], environ.get("LOCAL_RANK", "0")
        return RankInfo(int(rank), int(size), int(local), environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:  # a batch script has no step
        return _from_slurm(environ)
    for prefix, local_rank in (("OMPI_COMM_WORLD", "OMPI_COMM_WORLD_LOCAL_RANK"), ("PMI", "MPI_LOCALRANKID")):
        if f"{prefix}_RANK" in environ and f"{prefix}_SIZE" in environ:
            rank, size = environ[f"{prefix}_RANK"], environ[f"{prefix}_SIZE"]
            return _from_mpi(environ, int(rank), int(size), environ.get(local_rank))
    return RankInfo(0, 1, 0, "127.0.0.1", free_port("127.0.0.1"))


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    # The step's own variables: those of a heterogeneous job describe only its first group.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # Every task derives the same port; two jobs or steps on one node derive different ones.
    derived = 20000 + (int(environ.get("SLURM_JOB_ID", "0")) * 8 + int(environ["SLURM_STEP_ID"]) % 8) % 12000
    return RankInfo(
        int(environ["SLURM_PROCID"]),
        int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")),
        int(environ.get("SLURM_LOCALID", "0")),
        environ.get("MASTER_ADDR") or first_node(nodes),
        int(environ.get("MASTER_PORT", derived)),
    )


def first_node(nodelist: str) -> str:
    """First host of a Slurm node list: ``gpu[03-05,9],cpu1`` gives ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no node; set MASTER_ADDR to rank 0's host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _from_mpi(environ: Mapping[str, str], rank: int, size: int, local: str | None) -> RankInfo:
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return RankInfo(rank, size, int(local or 0), environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    if size == 1:
        return RankInfo(0, 1, 0, "127.0.0.1", free_port("127.0.0.1"))
    try:
        with needs_extra("mpi"):
            from mpi4py import MPI
    except MissingExtraError as error:
        message = f"{size} MPI ranks agree on an address by MPI: {error}; or set MASTER_ADDR and MASTER_PORT"
        raise ConfigError(message) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise ConfigError(f"mpi4py sees {world.Get_size()} ranks, the launcher started {size}; both must use one MPI")
    address, port = world.bcast((socket.gethostname(), free_port("0.0.0.0")) if rank == 0 else None)
    if local is None:
        local = str(world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())
    return RankInfo(rank, size, int(local), address, port)


def initialize(
    parallel: ParallelConfig, device: Device, seed: int, timeout_s: float = 600, info: RankInfo | None = None
) -> RankInfo:
    """Join the world and build Megatron-Core's groups and random states; on CPUs, install the shim.

    A collective waits ``timeout_s`` seconds for a missing rank. ``info`` defaults to :func:`bootstrap`.

    Raises:
        ConfigError: the number of ranks is not ``parallel.world_size``.
    """
    info = info or bootstrap()
    if info.world_size != parallel.world_size:
        raise ConfigError(
            f"parallel.world_size={parallel.world_size}, but the launcher started {info.world_size} ranks; change one"
        )
    prepare_process(device)
    from megatron.core import parallel_state, tensor_parallel

    if device.kind == "cpu":
        from megatron_fr.trainer import cpu_shim

        cpu_shim.install()
    if not torch.distributed.is_initialized():
        address = f"{info.master_addr}:{info.master_port}"
        awaited = f"all {info.world_size} ranks at {address}; this is rank {info.rank}"
        with say_what_is_awaited(lambda: awaited, stream=sys.stderr):
            torch.distributed.init_process_group(
                device.collective_backend,
                init_method=f"tcp://{address}",
                rank=info.rank,
                world_size=info.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return info


def shutdown() -> None:
    """Forget the model-parallel groups and leave the world, if there is one."""
    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

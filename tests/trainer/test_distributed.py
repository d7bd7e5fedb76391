"""From launchers' variables to a rank's place in the world."""

from __future__ import annotations

import pytest

from megatron_fr.config import ParallelConfig
from megatron_fr.errors import ConfigError
from megatron_fr.runtime.device import resolve_device
from megatron_fr.trainer.distributed import RankInfo, bootstrap, first_node, initialize

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "cpu[1-9]",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}


def test_torchrun_variables_win_over_slurms() -> None:
    assert bootstrap(SLURM | TORCHRUN) == RankInfo(3, 4, 1, "head", 1234)


def test_incomplete_torchrun_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT not"):
        bootstrap({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_slurm_step_meets_on_its_own_first_node_and_all_tasks_derive_one_port() -> None:
    info = bootstrap(SLURM)
    assert (info.rank, info.world_size, info.local_rank, info.master_addr) == (5, 8, 1, "gpu03")
    assert info.master_port == bootstrap(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port
    assert info.master_port != bootstrap(SLURM | {"SLURM_STEP_ID": "1"}).master_port
    assert info.master_port != bootstrap(SLURM | {"SLURM_JOB_ID": "4712"}).master_port
    assert 1024 < info.master_port < 32768
    assert bootstrap(SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "77"}).master_addr == "other"


def test_a_batch_script_outside_a_step_is_a_world_of_one() -> None:
    environ = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    info = bootstrap(environ)
    assert (info.rank, info.world_size, info.master_addr) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("node1,node2", "node1"),
        ("rack[2-3]n[1-4],other", "rack2n1"),
        ("a-b[07,09]-x", "a-b07-x"),
    ],
)
def test_the_first_node_of_a_list(nodelist: str, first: str) -> None:
    assert first_node(nodelist) == first


def test_an_empty_node_list_asks_for_the_address() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        bootstrap(SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""})


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"},
    ],
)
def test_mpi_ranks_take_a_given_address(variables: dict[str, str]) -> None:
    info = bootstrap(variables | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert info == RankInfo(2, 4, 1, "head", 1234)


def test_a_process_on_its_own_is_a_world_of_one_on_a_free_port() -> None:
    first, second = bootstrap({}), bootstrap({})
    assert (first.rank, first.world_size, first.local_rank) == (0, 1, 0)
    assert first.master_port != second.master_port


def test_a_world_of_the_wrong_size_names_both_sizes() -> None:
    info = RankInfo(0, 3, 0, "127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"parallel\.world_size=2.*3 ranks"):
        initialize(ParallelConfig(world_size=2), resolve_device("auto"), seed=0, info=info)

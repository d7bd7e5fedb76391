"""What ranks do in the layout tests: make a state, save it, load it in another layout, compare, and fail to write."""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from model_ranks import run_config
from silly_rename import silly_rename
from small_disk import SmallDisk

Job = tuple[str, dict[str, Any], str, str | None, str]  # model, layout, dtype, folder to load, folder to save


def pass_on(jobs: list[Job]) -> list[dict[str, Any]]:
    """For each job load a checkpoint (or take two Adam steps on made-up gradients), save, export through the bridge."""
    return [_pass_on(*job) for job in jobs]


def pass_on_and_save_run(jobs: list[Job], model: str, output: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """:func:`pass_on`, then a training checkpoint as a run at TP 2 writes it, after two steps; and its weights."""
    from megatron_fr.trainer.checkpoint import TrainingCheckpoints

    answers = pass_on(jobs)
    layout = {"world_size": 2, "tensor": 2}
    policy = _policy(model, layout, "float32")
    _two_steps(policy)
    config = run_config(Path(model), layout).model_copy(update={"output": Path(output)})
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    saved.begin(update=7, version=7, score=None)
    weights = {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}
    saved.finish()
    return answers, weights


def _pass_on(model: str, parallel: dict[str, Any], dtype: str, load: str | None, save: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_fr.trainer.checkpoint_io import BackgroundWriter, read

    policy = _policy(model, parallel, dtype)
    if load is None:
        _two_steps(policy)
    else:
        read(Path(load), policy, torch.load(f"{load}.extra"))
    lr = policy.step.optimizer.param_groups[0]["lr"]
    if torch.distributed.get_rank() == 0:
        Path(save).mkdir()
    torch.distributed.barrier()
    writer = BackgroundWriter()
    extra = writer.begin(Path(save), policy)
    draws = _draws()
    # The snapshot must not see what training does to the weights meanwhile.
    weights = {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.add_(1)
    assert writer.finished(wait=True)
    if torch.distributed.get_rank() == 0:
        torch.save(extra, f"{save}.extra")
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    return {"weights": weights, "extra": extra, "lr": lr, "draws": draws}


def _draws() -> list[float]:
    """The next number of each random state that a checkpoint holds."""
    import numpy as np
    from megatron.core import tensor_parallel

    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            drawn.append(float(torch.rand(())))
    return drawn


def _policy(model: str, parallel: dict[str, Any], dtype: str) -> Any:
    from megatron_fr.device import resolve_device
    from megatron_fr.trainer import distributed

    config = run_config(Path(model), parallel, dtype=dtype)
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron_fr.trainer.policy import build_policy

    return build_policy(config, device)


def _two_steps(policy: Any) -> None:
    noise = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    for _ in range(2):
        for chunk in policy.step.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.rand(parameter.shape, generator=noise) - 0.5)
            chunk.finish_grad_sync()
        policy.step.schedule.step(1)
        policy.step.optimizer.step()


def whole_tensors(folders: list[str]) -> list[dict[str, torch.Tensor]]:
    """Every tensor of each checkpoint, unsharded. One rank."""
    from megatron_fr.device import resolve_device
    from megatron_fr.trainer import distributed

    distributed.initialize(run_config(Path("unused"), {}).parallel, resolve_device("cpu"), seed=1)
    from megatron.core import dist_checkpointing

    loaded = [dist_checkpointing.load_plain_tensors(folder) for folder in folders]
    return [{name: value for name, value in tensors.items() if torch.is_tensor(value)} for tensors in loaded]


def failing_writes(model: str, output: str) -> dict[str, str]:
    """Save once; then again where no file may grow, where the folder cannot be made, and where an old one stays.

    Then a series with scores, of which the best stay; see the test. One rank.
    """
    from megatron_fr.errors import CheckpointError
    from megatron_fr.trainer.checkpoint import TrainingCheckpoints

    policy = _policy(model, {}, "float32")
    config = run_config(Path(model), {}).model_copy(update={"output": Path(output)})
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    saved.begin(update=1, version=1, score=None)
    saved.finish()
    errors: dict[str, str] = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel refuses longer files, as on a full disk
    try:
        with silly_rename():  # on NFS too nothing of it may stay
            saved.begin(update=2, version=2, score=None)
            saved.finish()
    except CheckpointError as error:
        errors["full"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saved.begin(update=3, version=3, score=None)  # with room again, it goes on
    saved.finish()
    (Path(output) / "file").write_text("")
    blocked = TrainingCheckpoints(config.model_copy(update={"output": Path(output) / "file"}), policy, lambda: b"")
    try:
        blocked.begin(update=4, version=4, score=None)
    except CheckpointError as error:
        errors["unwritable"] = str(error)
    _keep(config, policy)
    return errors


def save_on_small_disk(model: str, disk: SmallDisk) -> str:
    """Save, then again while the disk is full, and once more with room; the error of the second time. One rank."""
    from megatron_fr.errors import CheckpointError
    from megatron_fr.trainer.checkpoint import TrainingCheckpoints

    policy = _policy(model, {}, "float32")
    config = run_config(Path(model), {}).model_copy(update={"output": disk.folder / "run"})
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    error = "it was written"
    for update in (1, 2, 3):
        if update == 2:
            disk.fill(but=1_000_000)
        try:
            saved.begin(update=update, version=update, score=None)
            saved.finish()
        except CheckpointError as failure:
            assert update == 2
            error = str(failure)
            disk.empty()
    return error


def _keep(config: Any, policy: Any) -> None:
    """Updates 11 to 17 with these scores in a folder of their own, of which update 11 cannot be deleted."""
    from megatron_fr.config.sections import CheckpointConfig
    from megatron_fr.trainer.checkpoint import TrainingCheckpoints

    output = config.output / "scored"
    keep = CheckpointConfig(keep_last=1, keep_best=2)
    saved = TrainingCheckpoints(
        config.model_copy(update={"output": output, "checkpoint": keep}), policy, lambda: b"state"
    )
    for update, score in enumerate((0.1, 0.9, 0.5, None, 0.7, 0.9, 0.2), start=11):
        saved.begin(update=update, version=update, score=score)
        saved.finish()
        if update == 11:  # what a checkpoint that goes is renamed to
            (output / "training_state" / "update-000011.tmp" / "in the way").mkdir(parents=True)

"""What ranks do in the layout tests: make a state, save it, load it in another layout, compare, and fail to write."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.model_ranks import run_config
from tests.support.silly_rename import silly_rename
from tests.support.small_disk import SmallDisk

Job = tuple[str, dict[str, Any], str, str | None, str]  # model, layout, dtype, folder to load, folder to save


def pass_on(jobs: list[Job]) -> list[dict[str, Any]]:
    """For each job load a checkpoint (or take two Adam steps on made-up gradients), save, export through the bridge."""
    return [_pass_on(*job) for job in jobs]


#: Seconds that a collective may take while one rank's files take longer to read.
SHORT_S, SLOW_S = 3.0, 4.5


@contextmanager
def slow_reads() -> Iterator[list[str]]:
    """Within it rank 1's files take longer to read than a collective may last; names of what this process read."""
    from megatron_fr.checkpoint import io as checkpoint_io
    from megatron_fr.checkpoint import manifest as checkpoint_manifest

    describe, read = checkpoint_manifest.describe, list[str]()

    def slowly(path: Path, **options: Any) -> Any:
        read.append(path.name)
        if path.name == "__1_0.distcp":
            time.sleep(SLOW_S)
        return describe(path, **options)

    with (
        mock.patch.object(checkpoint_manifest, "describe", slowly),
        mock.patch.object(checkpoint_io, "describe", slowly),
    ):
        yield read


def pass_on_and_save_run(
    jobs: list[Job], model: str, output: str
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """:func:`pass_on`, then a training checkpoint as a run at TP 2 writes it, after two steps; and its weights.

    The last answer is what happened to its checksums: ``saving`` and ``checking`` are names of the files that this
    process itself read, ``whole`` and ``changed`` what the check said of it, and after one byte was changed.
    """
    from megatron_fr.checkpoint import check as checkpoint_check
    from megatron_fr.checkpoint.training import TrainingCheckpoints

    answers = pass_on(jobs)
    layout = {"world_size": 2, "tp": 2}
    policy = _policy(model, layout, "float32")
    _two_steps(policy)
    config = run_config(Path(model), layout).model_copy(update={"output": Path(output)})
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    sums: dict[str, Any] = {}
    with slow_reads() as read:
        saved.begin(update=7, version=7, score=None)
        weights = {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        folder = saved.finish()
        assert folder is not None
        sums["saving"] = list(read)
        read.clear()
        sums["whole"] = checkpoint_check.problem(folder)
        sums["checking"] = list(read)
    torch.distributed.barrier()
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        data.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    torch.distributed.barrier()
    sums["changed"] = checkpoint_check.problem(folder)
    if torch.distributed.get_rank() == 0:
        data.write_bytes(whole)
    return answers, weights, sums


def _pass_on(model: str, parallel: dict[str, Any], dtype: str, load: str | None, save: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_fr.checkpoint.io import BackgroundWriter, read

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
    from megatron_fr.runtime.device import resolve_device
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
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed

    distributed.initialize(run_config(Path("unused"), {}).parallel, resolve_device("cpu"), seed=1)
    from megatron.core import dist_checkpointing

    loaded = [dist_checkpointing.load_plain_tensors(folder) for folder in folders]
    return [{name: value for name, value in tensors.items() if torch.is_tensor(value)} for tensors in loaded]


def failing_writes(model: str, output: str) -> dict[str, str]:
    """Save once; then again where no file may grow, where the folder cannot be made, and where an old one stays.

    Then a series with scores, of which the best stay; see the test. One rank.
    """
    from megatron_fr.checkpoint.training import TrainingCheckpoints
    from megatron_fr.errors import CheckpointError

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
    from megatron_fr.checkpoint.training import TrainingCheckpoints
    from megatron_fr.errors import CheckpointError

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
    from megatron_fr.checkpoint.training import TrainingCheckpoints
    from megatron_fr.config.sections import CheckpointConfig

    output = config.output / "scored"
    keep = CheckpointConfig(keep_last=1, keep_best=2)
    saved = TrainingCheckpoints(
        config.model_copy(update={"output": output, "checkpoint": keep}), policy, lambda: b"state"
    )
    for update, score in enumerate((0.1, 0.9, 0.5, None, 0.7, 0.9, 0.2), start=11):
        saved.begin(update=update, version=update, score=score)
        saved.finish()
        if update == 11:  # what a checkpoint that goes is renamed to
            (output / "training_state" / "update-000011.deleted" / "in the way").mkdir(parents=True)


def go_on(model: str, output: str) -> dict[str, Any]:
    """Save updates 1 to 3, go on from 1, save 2; and go on with what is another model or temperature. One rank.

    Returns:
        errors by what was changed, and as ``folders`` what there was once update 2 was saved, the newest usable first.
    """
    from megatron_fr.checkpoint.manifest import write_manifest
    from megatron_fr.checkpoint.store import all_checkpoints, newest_usable
    from megatron_fr.checkpoint.training import TrainingCheckpoints
    from megatron_fr.config.sections import CheckpointConfig
    from megatron_fr.errors import CheckpointError
    from megatron_fr.hf.folder import read_hf_config

    policy = _policy(model, {}, "float32")
    config = run_config(Path(model), {}).model_copy(
        update={"output": Path(output), "checkpoint": CheckpointConfig(keep_last=3)}
    )
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    for update in (1, 2, 3):
        saved.begin(update=update, version=update, score=None)
        saved.finish()
    first = Path(output) / "training_state" / "update-000001"

    few = config.model_copy(update={"checkpoint": CheckpointConfig(keep_last=2)})
    resumed = TrainingCheckpoints(few, policy, lambda: b"state")
    assert resumed.load(first).update == 1
    resumed.set_newer_aside()
    resumed.begin(update=2, version=2, score=None)
    resumed.finish()
    newest = newest_usable(Path(output))
    assert newest is not None
    errors: dict[str, Any] = {"folders": [newest.name, *sorted(path.name for path in first.parent.iterdir())]}

    def refused(name: str, other: Any, hotter: Any = config) -> None:
        errors[name] = "accepted"
        try:
            TrainingCheckpoints(hotter, other, lambda: b"state").load(first)
        except CheckpointError as error:
            errors[name] = str(error)

    rope = {"rope_type": "default", "rope_theta": 20_000.0}
    for name, value in (
        ("rope_parameters", rope),
        ("rms_norm_eps", 1e-5),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
    ):
        other = Path(shutil.copytree(model, f"{output}-{name}"))
        settings = json.loads((other / "config.json").read_text())
        assert settings[name] != value
        (other / "config.json").write_text(json.dumps(settings | {name: value}))
        refused(name, replace(policy, hf_config=read_hf_config(other), source=other))
    other = Path(shutil.copytree(model, f"{output}-tokenizer"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    refused("tokenizer", replace(policy, source=other))
    (other / "tokenizer.json").unlink()
    refused("no tokenizer", replace(policy, source=other))
    hotter = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.7})})
    refused("temperature", policy, hotter)

    # As an older version wrote it.
    record = json.loads((first / "run.json").read_text())
    del record["fixed"]["rollout.temperature"]
    for name in ("rope_theta", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "tokenizer.json"):
        del record["fixed"]["model"][name]
    (first / "run.json").write_text(json.dumps(record))
    write_manifest(first, {}, ignored=".writing")
    refused("old", policy, hotter)
    errors["auto"] = _choose(config, "auto")
    for folder in all_checkpoints(Path(output)):
        (folder / "rollout.state").write_bytes(b"stale")
    errors["none usable"], errors["explicit"] = _choose(config, "auto"), _choose(config, str(first))
    never = config.model_copy(update={"checkpoint": CheckpointConfig(resume="never")})
    errors["never"], errors["by itself"] = _choose(never, None), _choose(config, None)
    return errors


def _choose(config: Any, given: str | None) -> str:
    from megatron_fr.checkpoint.check import folder_to_resume
    from megatron_fr.errors import CheckpointError

    try:
        return str(folder_to_resume(config, given))
    except CheckpointError as error:
        return str(error)

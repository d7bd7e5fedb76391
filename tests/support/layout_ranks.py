"""What ranks do in the layout tests: make a state, save it, load it in another layout, compare, and fail to write."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.model_ranks import run_config
from tests.support.silly_rename import silly_rename
from tests.support.small_disk import SmallDisk

#: Model, layout, dtype, folder to load, folder to save.
Job = tuple[str, dict[str, Any], str, str | None, str | None]


#: Seconds that a collective may take while rank 1 takes longer to write.
SHORT_S, SLOW_S = 3.0, 4.5


def pass_on(jobs: list[Job], run: str | None = None) -> list[dict[str, Any]]:
    """For each job load a checkpoint (or take two Adam steps on made-up gradients), save, export through the bridge.

    Args:
        run: output folder into which the first job also saves as a run does.
    """
    return [_pass_on(*job, run if number == 0 else None) for number, job in enumerate(jobs)]


@contextmanager
def slow_writes() -> Iterator[None]:
    """Within it rank 1 takes longer to write than a collective may last."""
    from megatron_fr.checkpoint import io

    write, timeout = io._write, torch.distributed.distributed_c10d._get_default_timeout("gloo")

    def slowly(*args: Any) -> Any:
        time.sleep(SLOW_S * torch.distributed.get_rank())
        return write(*args)

    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
    with mock.patch.object(io, "_write", slowly):
        yield
    torch.distributed.distributed_c10d._set_pg_timeout(timeout)


def _pass_on(
    model: str, parallel: dict[str, Any], dtype: str, load: str | None, save: str | None, run: str | None
) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_fr.checkpoint.io import BackgroundWriter, read
    from megatron_fr.checkpoint.training import TrainingCheckpoints

    policy = _policy(model, parallel, dtype)
    if load is None:
        _two_steps(policy)
    else:
        read(Path(load), policy, torch.load(f"{load}.extra"))
    answer: dict[str, Any] = {"lr": policy.step.optimizer.param_groups[0]["lr"]}
    if run is not None:
        config = run_config(Path(model), parallel).model_copy(update={"output": Path(run)})
        saved = TrainingCheckpoints(config, policy, lambda: b"state")
        with slow_writes():
            saved.begin(update=7, version=7, score=None)
            saved.finish()
    if save is not None:
        if torch.distributed.get_rank() == 0:
            Path(save).mkdir()
        torch.distributed.barrier()
        writer = BackgroundWriter()
        answer["extra"] = writer.begin(Path(save), policy)
        answer["weights"] = {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}
        # The copy must not see what training does meanwhile.
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(1)
        for part in getattr(policy.step.optimizer, "chained_optimizers", [policy.step.optimizer]):
            for state in part.optimizer.state.values():
                state["exp_avg"].add_(1)
        assert writer.finished(wait=True)
        if torch.distributed.get_rank() == 0:
            torch.save(answer["extra"], f"{save}.extra")
    answer["draws"] = _draws()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    return answer


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
    from megatron_fr.errors import CheckpointError, MegatronFRError

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
    try:
        TrainingCheckpoints(config.model_copy(update={"output": Path(output) / "file" / "in"}), policy, lambda: b"")
    except MegatronFRError as error:
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
    from megatron_fr.checkpoint.store import all_checkpoints, find_resumed, newest_usable
    from megatron_fr.checkpoint.training import TrainingCheckpoints
    from megatron_fr.config.sections import CheckpointConfig
    from megatron_fr.errors import MegatronFRError
    from megatron_fr.hf.folder import read_spec

    policy = _policy(model, {}, "float32")
    config = run_config(Path(model), {}).model_copy(
        update={"output": Path(output), "checkpoint": CheckpointConfig(keep_last=3)}
    )
    saved = TrainingCheckpoints(config, policy, lambda: b"state")
    for update in (1, 2, 3):
        saved.begin(update=update, version=update, score=None)
        saved.finish()
    first = Path(output) / "training_state" / "update-000001"

    errors: dict[str, Any] = {}

    def refused(name: str, try_it: Callable[[], Any]) -> None:
        try:
            errors[name] = f"accepted: {try_it()}"
        except MegatronFRError as error:
            errors[name] = str(error)

    refused("second run", lambda: TrainingCheckpoints(config, policy, lambda: b"state"))
    saved.close()

    few = config.model_copy(update={"checkpoint": CheckpointConfig(keep_last=2)})
    resumed = TrainingCheckpoints(few, policy, lambda: b"state")
    assert resumed.load(first).update == 1
    resumed.set_newer_aside()
    resumed.begin(update=2, version=2, score=None)
    resumed.finish()
    newest = newest_usable(Path(output))
    assert newest is not None
    errors["folders"] = [newest.name, *sorted(path.name for path in first.parent.iterdir())]
    resumed.close()

    def load(other: Any, hotter: Any = config) -> int:
        checkpoints = TrainingCheckpoints(hotter, other, lambda: b"state")
        try:
            return checkpoints.load(first).update
        finally:
            checkpoints.close()

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
        changed = replace(policy, spec=read_spec(other), source=other)
        refused(name, partial(load, changed))
    other = Path(shutil.copytree(model, f"{output}-tokenizer"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    refused("tokenizer", lambda: load(replace(policy, source=other)))
    (other / "tokenizer.json").unlink()
    refused("no tokenizer", lambda: load(replace(policy, source=other)))
    hotter = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.7})})
    refused("temperature", lambda: load(policy, hotter))

    # As an older version wrote it: manifest and record, a bit of a tensor later changed.
    record = json.loads((first / "run.json").read_text())
    del record["fixed"]["rollout.temperature"]
    for name in ("rope_theta", "norm_eps", "tie", "tokenizer.json"):
        del record["fixed"][f"model.{name}"]
    (first / "run.json").write_text(json.dumps(record))
    manifest = json.loads((first / "manifest.json").read_text())
    manifest["files"]["run.json"] = {"bytes": (first / "run.json").stat().st_size, "sha256": "whatever it was"}
    (first / "manifest.json").write_text(json.dumps(manifest))
    refused("old", lambda: load(policy, hotter))
    data = first / "__0_0.distcp"
    whole = data.read_bytes()
    for name, at in (("changed weight", len(whole) // 2), ("changed moment", len(whole) * 4 // 5)):
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(name, lambda: load(policy))
    refused("auto", lambda: find_resumed(config.output, "auto"))
    for folder in all_checkpoints(Path(output)):
        (folder / "rollout.state").write_bytes(b"cut")
    for name, given in (("none usable", "auto"), ("explicit", str(first)), ("never", "never")):
        refused(name, partial(find_resumed, config.output, given))
    return errors

"""What ranks do in the model tests: build, load, run Megatron's own schedule, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_fr.config import RunConfig


def run_config(folder: Path, parallel: dict[str, Any], dtype: str = "float32", **train: Any) -> RunConfig:
    """A configuration of which only the model and the layout matter."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": dtype},
            "parallel": parallel,
            "train": {"num_updates": 1, "batch_size": 8, **train},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )


def check_model(folder: Path, parallel: dict[str, Any], out: Path | None = None) -> dict[str, Any]:
    """Load ``folder`` in one layout, run its batch, export it again, and write it to ``out``.

    Returns, on ranks that have them: ``difference``, the largest error of a log-probability against transformers over
    real tokens and the whole vocabulary; ``wrong``, names of exported tensors that are not bit-equal to the file's.
    """
    from safetensors.torch import load_file

    from megatron_fr.hf.export import hf_tensor_specs, iter_hf_tensors
    from megatron_fr.hf.folder import read_spec
    from megatron_fr.hf.model import load_hf_weights, save_hf_folder
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed
    from megatron_fr.trainer.model import build_model

    config = run_config(folder, parallel)
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron.core import parallel_state

    spec = read_spec(folder)
    chunks = build_model(spec, config, device)
    load_hf_weights(chunks, spec, folder)
    answer: dict[str, Any] = {}

    batch = torch.load(folder / "batch.pt")
    logits = forward(chunks, batch["ids"])
    if logits is not None:
        logprobs = gather_vocab(logits)[..., : spec.vocab].log_softmax(-1)
        error = (logprobs - batch["logprobs"]).abs().amax(-1)
        answer["difference"] = float(error[batch["mask"]].max())

    specs = hf_tensor_specs(spec, torch.float32)
    wanted = load_file(folder / "model.safetensors")
    wrong, names = [], []
    for name, tensor in iter_hf_tensors(chunks, spec):
        names.append(name)
        if torch.distributed.get_rank() == 0:
            assert tensor is not None
            if not torch.equal(tensor, wanted[name]):
                wrong.append(name)
        else:
            assert tensor is None
    answer["wrong"] = wrong + sorted(set(wanted) ^ set(names))
    assert names == [spec.name for spec in specs]
    assert all(spec.shape == tuple(wanted[spec.name].shape) for spec in specs)
    if out is not None:
        save_hf_folder(chunks, spec, folder, out, shard_bytes=200_000)
    parallel_state.destroy_model_parallel()
    return answer


def check_models(
    jobs: list[tuple[Path, dict[str, Any], Path | None]],
) -> list[dict[str, Any]]:
    """Several :func:`check_model` calls in one set of processes, since starting them is what takes long."""
    return [check_model(*job) for job in jobs]


def check_bfloat16(folder: Path, parallel: dict[str, Any]) -> float:
    """Mean error of next-token log-probabilities in bfloat16, against transformers in float32, over real tokens."""
    from megatron_fr.hf.export import hf_tensor_specs, iter_hf_tensors
    from megatron_fr.hf.folder import read_spec
    from megatron_fr.hf.model import load_hf_weights
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed
    from megatron_fr.trainer.model import build_model

    config = run_config(folder, parallel, dtype="bfloat16")
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    spec = read_spec(folder)
    chunks = build_model(spec, config, device)
    load_hf_weights(chunks, spec, folder)
    assert all(parameter.dtype == torch.bfloat16 for chunk in chunks for parameter in chunk.parameters())
    batch = torch.load(folder / "batch.pt")
    logits = forward(chunks, batch["ids"])
    assert logits is not None
    assert logits.dtype == torch.bfloat16
    logprobs = gather_vocab(logits)[..., : spec.vocab].float().log_softmax(-1)
    dtypes = {tensor.name: tensor.dtype for tensor in hf_tensor_specs(spec, torch.bfloat16)}
    for name, tensor in iter_hf_tensors(chunks, spec):
        assert tensor is None or tensor.dtype == dtypes[name]
    distributed.shutdown()
    return mean_next_token_error(logprobs, batch)


def mean_next_token_error(logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """Mean absolute error of the log-probabilities of the batch's own next tokens."""
    chosen = batch["ids"][:, 1:, None]
    mine, theirs = (values[:, :-1].gather(-1, chosen).squeeze(-1) for values in (logprobs, batch["logprobs"]))
    return float((mine - theirs).abs()[batch["mask"][:, 1:]].mean())


def forward(chunks: list[torch.nn.Module], ids: torch.Tensor) -> torch.Tensor | None:
    """Logits of a batch through Megatron's forward-only schedule; None before the last pipeline stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found: list[torch.Tensor] = []

    def step(iterator: Any, model: torch.nn.Module) -> Any:
        del iterator
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        output = model(ids, positions, None)

        def keep(logits: torch.Tensor, **_: Any) -> Any:
            found.append(logits.detach().clone())
            return logits.sum(), {}

        return output, keep

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[None],
            model=chunks,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=len(ids),
            forward_only=True,
        )
    return found[0] if found else None


def gather_vocab(logits: torch.Tensor) -> torch.Tensor:
    """All TP ranks' columns side by side."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def check_gradients(jobs: list[tuple[Path, dict[str, Any], dict[str, Any]]]) -> list[dict[str, torch.Tensor]]:
    """Gradients of each job's model under their Hugging Face names (rank 0), then one step of Megatron's optimizer.

    The loss is minus the mean log-probability of the next token over the batch's real tokens; every data-parallel
    rank computes it on the whole batch. With the distributed optimizer, which leaves each rank only its shard of the
    gradients, the change of the weights over the step is returned instead.
    """
    return [_gradients(folder, parallel, train) for folder, parallel, train in jobs]


def _gradients(folder: Path, parallel: dict[str, Any], train: dict[str, Any]) -> dict[str, torch.Tensor]:
    from megatron_fr.hf.export import iter_hf_tensors
    from megatron_fr.hf.folder import read_spec
    from megatron_fr.hf.model import load_hf_weights
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed
    from megatron_fr.trainer.model import build_model

    config = run_config(folder, parallel, **train)
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_fr.trainer.logprob import LogprobSettings
    from megatron_fr.trainer.policy import make_optimizer, wrap_for_training
    from megatron_fr.trainer.step import HeadTask, LogprobHead

    spec = read_spec(folder)
    chunks = build_model(spec, config, device)
    load_hf_weights(chunks, spec, folder)
    ddp = wrap_for_training(chunks, config.parallel)
    optimizer = make_optimizer(ddp, config.optimizer, config.parallel, torch.float32)
    batch = torch.load(folder / "batch.pt")
    ids, mask = batch["ids"], batch["mask"]
    counted = mask[:, 1:].sum()

    head = LogprobHead(
        LogprobSettings(
            spec.vocab,
            mode=config.train.logprob_mode,
            chunk_tokens=config.train.logprob_chunk_tokens,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    )
    # The last position predicts nothing. With recomputed logits only the real tokens go through the head.
    targets, counts = ids.roll(-1, 1), mask.roll(-1, 1)
    counts[:, -1] = False
    task = HeadTask(targets, counts if config.train.logprob_mode == "recompute" else None)

    def step(iterator: Any, model: torch.nn.Module) -> Any:
        del iterator
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        output = model(ids, positions, None, output_processor=head, output_processor_context=task)
        return output, lambda values: (-values[0][counts].sum() / counted, {})

    for chunk in ddp:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None],
        model=ddp,
        num_microbatches=1,
        seq_length=ids.shape[1],
        micro_batch_size=len(ids),
        forward_only=False,
    )
    weights = {name: value.clone() for name, value in iter_hf_tensors(ddp, spec) if value is not None}
    found: dict[str, torch.Tensor] = {}
    if not config.parallel.distributed_optimizer:
        kept = [parameter.data for chunk in ddp for parameter in chunk.parameters()]
        for chunk in ddp:
            for parameter in chunk.parameters():
                parameter.data = parameter.main_grad
        found = {name: value.clone() for name, value in iter_hf_tensors(ddp, spec) if value is not None}
        for parameter, data in zip((p for chunk in ddp for p in chunk.parameters()), kept, strict=True):
            parameter.data = data
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    succeeded, _, _ = optimizer.step()
    assert succeeded
    change = {name: value - weights[name] for name, value in iter_hf_tensors(ddp, spec) if value is not None}
    assert all(bool(value.any()) for value in change.values())
    parallel_state.destroy_model_parallel()
    return found or change

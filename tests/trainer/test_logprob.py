"""The head's log-probabilities, entropy and gradients against plain torch, and the memory that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.measure import measure
from megatron_fr.trainer.logprob import LogprobMode, LogprobSettings, head_logprobs
from tests.support.parallel_launch import run_ranks

MODES: tuple[LogprobMode, ...] = ("keep", "recompute")
#: name: dtype, vocabulary, temperature, tolerance relative to the largest value.
CASES = {
    "float64": (torch.float64, 1000, 1.0, 1e-13),
    "float32": (torch.float32, 1000, 0.7, 5e-6),
    "float32, small vocabulary": (torch.float32, 9, 1.3, 5e-6),
    "bfloat16": (torch.bfloat16, 1000, 0.7, 2e-2),
}
TOKENS, HIDDEN, PADDED = 211, 16, 1008


def _inputs(dtype: torch.dtype, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    weight[vocab:] *= 50  # padding must not matter, however large
    weight[1] *= 20  # and a sharp distribution has logits far apart
    targets = torch.randint(0, vocab, (TOKENS,), generator=generator)
    upstream = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    upstream[::3] = 0
    return hidden.to(dtype), weight.to(dtype), targets, upstream


def _plain(name: str) -> list[torch.Tensor]:
    """Log-probabilities, entropy and both gradients in float64, by torch's own functions."""
    dtype, vocab, temperature, _ = CASES[name]
    hidden, weight, targets, upstream = _inputs(dtype, vocab)
    hidden, weight = hidden.double().detach().requires_grad_(), weight.double().detach().requires_grad_()
    logp = (hidden @ weight[:vocab].t() / temperature).log_softmax(-1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    (chosen * upstream).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    entropy = torch.where(logp.exp() > 0, -logp.exp() * logp, 0).sum(-1)
    return [value.detach() for value in (chosen, entropy, hidden.grad, weight.grad)]


def _ours(name: str, mode: LogprobMode, rank: int = 0, size: int = 1, group: Any = None) -> list[torch.Tensor]:
    dtype, vocab, temperature, _ = CASES[name]
    hidden, weight, targets, upstream = _inputs(dtype, vocab)
    hidden, weight = hidden.requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()
    logprobs, entropy = head_logprobs(
        hidden, weight, targets, LogprobSettings(vocab, temperature, mode, chunk_tokens=50, group=group)
    )
    assert logprobs.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not entropy.requires_grad
    (logprobs * upstream).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    return [value.detach().double() for value in (logprobs, entropy, hidden.grad, weight.grad)]


def _assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], name: str) -> None:
    tolerance = CASES[name][3]
    for what, a, b in zip(("log-probability", "entropy", "d hidden", "d weight"), found, wanted, strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        assert error <= tolerance, f"{name}: {what} is off by {error:.2g}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_both_modes_equal_plain_torch(name: str, mode: LogprobMode) -> None:
    _assert_close(_ours(name, mode), _plain(name), name)


def _rank_answers() -> dict[tuple[str, str], list[torch.Tensor]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    answers = {(name, mode): _ours(name, mode, rank, size, dist.group.WORLD) for name in CASES for mode in MODES}
    empty, _ = head_logprobs(
        torch.zeros(0, HIDDEN), torch.ones(4, HIDDEN), torch.zeros(0, dtype=torch.int64), LogprobSettings(8)
    )
    assert empty.shape == (0,)
    dist.destroy_process_group()
    return answers


@pytest.mark.slow
def test_two_vocabulary_shards_equal_plain_torch_also_where_one_is_all_padding() -> None:
    ranks = run_ranks(_rank_answers, 2)
    for name, mode in ranks[0]:
        (chosen, entropy, d_hidden, d_weight), (other, other_entropy, other_hidden, other_weight) = (
            answers[name, mode] for answers in ranks
        )
        assert torch.equal(chosen, other)
        assert torch.equal(entropy, other_entropy)
        _assert_close(
            [chosen, entropy, d_hidden + other_hidden, torch.cat([d_weight, other_weight])], _plain(name), name
        )


@pytest.mark.parametrize("mode", MODES)
def test_no_token_at_all_gives_zero_gradients(mode: LogprobMode) -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    logprobs, _ = head_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), LogprobSettings(6, mode=mode))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(6, 4))


def test_kept_logits_are_overwritten_so_a_second_backward_is_an_error() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logprobs, _ = head_logprobs(hidden, weight, torch.zeros(3, dtype=torch.int64), LogprobSettings(6))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def _peak(tokens: int, settings: LogprobSettings, dtype: torch.dtype) -> float:
    """MiB beyond inputs and gradients of a forward and backward, the least of two runs."""
    hidden = torch.randn(tokens, 8).to(dtype).requires_grad_()
    weight = torch.randn(settings.vocab_size, 8).to(dtype).requires_grad_()
    targets = torch.randint(0, settings.vocab_size, (tokens,))

    def work() -> None:
        head_logprobs(hidden, weight, targets, settings)[0].sum().backward()

    work()  # leaves the gradients allocated: what follows adds to them
    return min(measure(work)[1] for _ in range(2)) / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)],  # minutes where a CPU has no bfloat16
)
def test_peak_memory_is_one_logits_buffer_when_kept_and_one_chunk_when_recomputed(dtype: torch.dtype) -> None:
    settings = LogprobSettings(16_384, chunk_tokens=256)
    logits = 4096 * 16_384 * dtype.itemsize / 2**20
    slack = 16  # float32 scratch of 2 MiB, the gradients of hidden and weight before they are added, the allocator's
    kept = _peak(4096, settings, dtype)
    assert logits - slack <= kept <= logits + slack, f"{kept:.0f} MiB with logits of {logits:.0f} MiB"
    for tokens in (1024, 4096):
        recomputed = _peak(tokens, replace(settings, mode="recompute"), dtype)
        assert recomputed <= logits / 16 + slack, f"{tokens} tokens took {recomputed:.0f} MiB"

"""Buckets of a weight sync: whole tensors in order, bounded memory, the same bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from safetensors.torch import save

from megatron_fr.weight_sync.buckets import buckets, take_bytes


def test_a_bucket_holds_whole_tensors_of_one_dtype_in_order_and_their_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    named = []
    for i in range(60):
        shape = torch.randint(1, 40, (2,), generator=generator).tolist()
        named.append((f"t{i}", torch.randn(shape, generator=generator).to(dtypes[i % 20 // 7])))
    named[30] = ("big", torch.randn(100, 40))  # larger than a bucket
    limit = 5000
    made = list(buckets(iter(named), max_bytes=limit))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in named]
    assert len(made) > 10
    for bucket in made:
        contents = list(bucket)
        assert sum(tensor.nbytes for _, tensor in bucket) <= limit or [name for name, _ in bucket] == ["big"]
        assert len({tensor.dtype for _, tensor in bucket}) == 1
        flat = take_bytes(bucket)
        offset = 0
        for _, wanted in contents:
            got = flat[offset : offset + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
            assert offset % wanted.element_size() == 0
            assert save({"x": got.clone()}) == save({"x": wanted})
            offset += wanted.nbytes
        assert flat.numel() == offset


def test_only_one_bucket_of_tensors_is_alive_at_a_time() -> None:
    """The stream makes each tensor when it is asked for, as the gathering over ranks does."""
    size, limit, alive, most = 4000, 20_000, 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= size

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for i in range(200):
            tensor = torch.zeros(size // 4)
            weakref.finalize(tensor, gone)
            alive += size
            most = max(most, alive)
            yield f"t{i}", tensor
            del tensor

    count = 0
    for bucket in buckets(stream(), max_bytes=limit):
        count += len(bucket)
        take_bytes(bucket)  # from here on the bytes are one copy of the bucket's size
        del bucket
    assert count == 200
    assert limit <= most <= limit + size

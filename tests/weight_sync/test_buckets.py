"""Buckets of a weight sync: whole tensors in order, bounded memory, the same bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from safetensors.torch import save

from megatron_fr.weight_sync.buckets import buckets


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
    assert [name for bucket in made for name in bucket.names] == [name for name, _ in named]
    assert len(made) > 10
    given = dict(named)
    for bucket in made:
        assert bucket.num_bytes <= limit or bucket.names == ["big"]
        assert len(set(bucket.dtypes)) == 1
        flat = bucket.payload()
        assert flat.numel() == bucket.num_bytes
        offset = 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            wanted = given[name]
            size = wanted.numel() * wanted.element_size()
            got = flat[offset : offset + size].view(wanted.dtype).view(shape)
            assert offset % wanted.element_size() == 0
            assert save({"x": got.clone()}) == save({"x": wanted})
            offset += size


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
        count += len(bucket.names)
        bucket.payload()  # from here on the bytes are one copy of the bucket's size
        del bucket
    assert count == 200
    assert limit <= most <= limit + size

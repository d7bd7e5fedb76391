"""The trajectory's contract and its codec."""

import dataclasses
import io

import numpy as np
import pytest

from megatron_fr.errors import TrajectoryError
from megatron_fr.trajectory import NO_VERSION, ModelLimits, Timings, Trajectory, decode, encode

LIMITS = ModelLimits(vocab_size=100, max_context=16, num_moe_layers=3, top_k=2, num_experts=8)
DENSE = ModelLimits(vocab_size=100, max_context=16)


def routes(rows, limits=LIMITS, seed=0):
    """Distinct experts at random, [rows, layers, top_k]."""
    shape = (rows, limits.num_moe_layers, limits.num_experts)
    order = np.random.default_rng(seed).random(shape).argsort(axis=-1)
    return order[..., : limits.top_k].astype(limits.route_dtype)


def trajectory(**changes):
    """Three prompt tokens, two sampled ones, a tool's answer, two sampled ones of a later version."""
    values = {
        "id": "t1",
        "prompt_id": "p1",
        "group_id": "g1",
        "tokens": np.array([5, 6, 7, 50, 51, 8, 52, 99], dtype=np.int32),
        "action_mask": np.array([0, 0, 0, 1, 1, 0, 1, 1], dtype=bool),
        "behavior_logprobs": np.array([0, 0, 0, -0.5, -1.25, 0, -0.01, 0], dtype=np.float32),
        "versions": np.array([-1, -1, -1, 4, 4, -1, 5, 5], dtype=np.int32),
        "reward": 0.75,
        "routed_experts": routes(7),
        "reward_parts": {"reward": 0.75, "format": 1.0},
        "num_turns": 2,
        "num_tool_calls": 1,
        "num_tool_errors": 1,
        "finish_reason": "length",
        "timings": Timings(0.5, 1.5, 0.25),
    }
    return Trajectory(**{**values, **changes})


def changed(name, index, value):
    array = getattr(trajectory(), name).copy()
    array[index] = value
    return trajectory(**{name: array})


def refusal(bad, limits=LIMITS):
    with pytest.raises(TrajectoryError) as caught:
        bad.validate(limits)
    text = str(caught.value)
    assert text.startswith("trajectory 't1' (prompt 'p1'): ")
    return text


def assert_same(a, b):
    for field in dataclasses.fields(Trajectory):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)
        else:
            assert left == right


def test_a_sound_trajectory_passes_with_and_without_routes():
    trajectory().validate(LIMITS)
    trajectory(routed_experts=None).validate(DENSE)
    trajectory(routed_experts=None, route_error="the engine returned none").validate(LIMITS)


def test_counts_leave_observations_out():
    t = trajectory()
    assert len(t) == 8
    assert t.num_action_tokens == 4
    assert t.oldest_version == 4
    assert (t.versions[~t.action_mask] == NO_VERSION).all()


@pytest.mark.parametrize("name", ["action_mask", "behavior_logprobs", "versions"])
def test_an_array_of_another_length_or_dtype_is_refused(name):
    array = getattr(trajectory(), name)
    assert f"{name} has shape (7,), expected (8,)" in refusal(trajectory(**{name: array[:-1]}))
    assert f"{name} has dtype float64" in refusal(trajectory(**{name: array.astype(np.float64)}))


def test_tokens_of_the_wrong_kind_are_refused():
    assert "tokens has dtype int64, expected int32" in refusal(trajectory(tokens=trajectory().tokens.astype(np.int64)))
    assert "tokens has shape (1, 8)" in refusal(trajectory(tokens=trajectory().tokens[None]))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (changed("tokens", 2, 100), "tokens holds an id outside 0..99"),
        (changed("tokens", 2, -1), "tokens holds an id outside 0..99"),
        (changed("action_mask", slice(None), False), "action_mask marks no action token"),
        (changed("action_mask", 0, True), "action_mask marks the first token"),
        (changed("behavior_logprobs", 3, np.nan), "behavior_logprobs holds a non-finite value"),
        (changed("behavior_logprobs", 7, -np.inf), "behavior_logprobs holds a non-finite value"),
        (changed("behavior_logprobs", 3, 0.5), "behavior_logprobs holds 0.5 > 0"),
        (changed("versions", 6, NO_VERSION), "versions is missing on an action token"),
        (trajectory(reward=float("nan")), "reward is nan"),
        (trajectory(reward=float("-inf")), "reward is -inf"),
        (trajectory(finish_reason="done"), "finish_reason is 'done', expected one of"),
    ],
)
def test_every_broken_field_is_refused_with_id_field_and_reason(bad, reason):
    assert reason in refusal(bad)


def test_masked_slots_are_not_judged():
    changed("behavior_logprobs", 5, np.nan).validate(LIMITS)


def test_rounding_above_0_is_tolerated():
    changed("behavior_logprobs", 7, 1e-6).validate(LIMITS)


def test_the_length_must_fit_the_context_and_hold_a_prediction():
    short = ModelLimits(vocab_size=100, max_context=7, num_moe_layers=3, top_k=2, num_experts=8)
    assert "tokens has length 8, expected 2 to 7" in refusal(trajectory(), short)
    one = {
        name: getattr(trajectory(), name)[-1:] for name in ("tokens", "action_mask", "behavior_logprobs", "versions")
    }
    assert "tokens has length 1, expected 2 to 16" in refusal(trajectory(**one, routed_experts=None))


def test_routes_have_one_row_a_processed_token_and_none_for_the_last():
    assert "routed_experts has shape (8, 3, 2), expected (7, 3, 2)" in refusal(trajectory(routed_experts=routes(8)))
    assert "expected (7, 3, 2)" in refusal(trajectory(routed_experts=routes(7)[:, :2]))
    assert "expected (7, 3, 2)" in refusal(trajectory(routed_experts=routes(7)[..., :1]))


def test_routes_to_missing_or_repeated_experts_are_refused_with_their_place():
    assert "names expert 8, the model has 8" in refusal(changed("routed_experts", (2, 1, 0), 8))
    bad = changed("routed_experts", (4, 2, 0), 3)
    bad.routed_experts[4, 2, 1] = 3
    assert "names an expert twice at row 4, MoE layer 2" in refusal(bad)
    assert "has dtype int64" in refusal(trajectory(routed_experts=routes(7).astype(np.int64)))


def test_why_routes_are_unusable_is_told_without_refusing_the_trajectory():
    assert trajectory().check_routes(LIMITS) is None
    assert trajectory(routed_experts=None).check_routes(LIMITS) == "is missing"
    assert trajectory(routed_experts=None, route_error="no rows").check_routes(LIMITS) == "no rows"


def test_route_dtype_is_one_byte_up_to_256_experts():
    assert ModelLimits(1, 1, 1, 1, 256).route_dtype == np.uint8
    assert ModelLimits(1, 1, 1, 1, 257).route_dtype == np.uint16
    wide = ModelLimits(100, 16, 3, 2, 512)
    t = trajectory(routed_experts=routes(7, wide))
    t.validate(wide)
    assert_same(decode(encode([t]))[0], t)


def test_the_codec_gives_back_every_field_in_order():
    originals = [
        trajectory(),
        trajectory(id="t2", routed_experts=None, route_error="prompt rows missing: 3 of 5", reward_parts={}),
        trajectory(id="π", finish_reason="env_done", routed_experts=routes(7, seed=4)),
    ]
    copies = decode(encode(originals))
    assert [c.id for c in copies] == ["t1", "t2", "π"]
    for original, copy in zip(originals, copies, strict=True):
        assert_same(original, copy)
        copy.validate(LIMITS)
    assert decode(encode([])) == []


def test_logprobs_survive_bit_by_bit():
    values = np.array([0, 0, 0, -1e-30, -88.722839, 0, -np.float32(1) / 3, -0.0], dtype=np.float32)
    copy = decode(encode([trajectory(behavior_logprobs=values)]))[0]
    assert copy.behavior_logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize("damage", ["empty", "cut", "cut_head", "noise", "flipped", "other archive", "pickle"])
def test_damaged_bytes_are_a_trajectory_error_never_another_one(damage):
    payload = encode([trajectory()])
    middle = len(payload) // 2
    other = io.BytesIO()
    np.savez(other, a=np.zeros(3))
    pickled = io.BytesIO()
    np.savez(pickled, heads=np.array([{"a": 1}], dtype=object))
    bad = {
        "empty": b"",
        "cut": payload[:middle],
        "cut_head": payload[middle:],
        "noise": bytes(range(256)) * 10,
        "flipped": payload[:300] + bytes(b ^ 0xFF for b in payload[300:420]) + payload[420:],
        "other archive": other.getvalue(),
        "pickle": pickled.getvalue(),
    }[damage]
    with pytest.raises(TrajectoryError, match=f"a payload of {len(bad)} bytes is no trajectory archive"):
        decode(bad)


def test_no_single_flipped_byte_escapes_as_another_exception_or_a_changed_array():
    t = trajectory()
    payload = encode([t])
    for position in range(0, len(payload), 3):
        damaged = bytearray(payload)
        damaged[position] ^= 0x10
        try:
            copy = decode(bytes(damaged))[0]
        except TrajectoryError:
            continue
        assert_same(copy, t)  # a byte of the archive's bookkeeping that nobody reads

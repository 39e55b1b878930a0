import json
import math
import re

import numpy as np
import pytest

from tests.rollouts.conftest import DATA, admitted, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.metrics.measures import share_dropped
from trl_atropos.rollouts import drop_reasons
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire import parse_group
from trl_atropos.rollouts.wire_values import RejectedGroup


def rows(
    group, max_sequence_length=64, temperature=1.0, single_row_groups="refuse"
) -> list[Rollout]:
    return admitted(
        group,
        max_sequence_length=max_sequence_length,
        temperature=temperature,
        single_row_groups=single_row_groups,
    )


def recorded(name: str) -> list[dict]:
    return json.loads((DATA / f"{name}.json").read_text())["batch"]


def is_unknown(logprobs: np.ndarray) -> list[bool]:
    return np.isnan(logprobs).tolist()


def test_recorded_group_splits_at_first_trained_token():
    group = recorded("single_turn")[0]
    row = rows(group)[0]
    assert row.prompt_ids.tolist() == group["tokens"][0][:4]
    assert row.completion_ids.tolist() == group["tokens"][0][4:]
    assert row.mask.tolist() == [True] * 16
    assert row.logprobs.tolist() == np.float32(group["inference_logprobs"][0][4:]).tolist()
    assert (row.score, row.env_id, row.policy_version) == (0.015, 0, None)


def test_masked_gap_is_context_without_logprobs():
    group = recorded("multi_turn")[0]
    trained = [mask != -100 for mask in group["masks"][0]]
    first, last = trained.index(True), len(trained) - 1 - trained[::-1].index(True)
    row = rows(group, max_sequence_length=256)[0]
    assert row.mask.tolist() == trained[first : last + 1]
    assert not row.mask.all()
    assert is_unknown(row.logprobs) == (~row.mask).tolist()


def test_every_drop_reason_has_description():
    """But for those of which a waiting run is told otherwise, and for what is no loss."""
    reasons = {
        value
        for name, value in vars(drop_reasons).items()
        if name.isupper() and isinstance(value, str)
    }
    elsewhere = {"evaluation", "lost_in_delivery", "resumed_mid_batch", "joined"}
    assert reasons - drop_reasons.DESCRIPTIONS.keys() == elsewhere


def test_evaluation_group_is_never_trained_on():
    """Whatever it holds, such as another temperature, and however large its scores are."""
    planted = make_group(1000, 500) | {"group_overrides": {"evaluation": True}}
    planted["generation_params"] = {"temperature": 0.1}
    intake = Intake(max_sequence_length=64, temperature=1.0, single_row_groups="refuse")
    rollouts = intake.admit(
        [parse_group(json.dumps(group).encode()) for group in (make_group(0, 1), planted)]
    )
    assert [rollout.score for rollout in rollouts] == [0, 1]
    counted = intake.metrics()
    assert counted["rollouts/dropped_evaluation"] == 2
    assert share_dropped(counted, 2) == 0.0


def test_masked_tail_is_cut_off():
    row = rows(make_group(0, 1, masks=[[-100, -100, 10, -100], [-100, -100, 11, 9]]))[0]
    assert row.completion_ids.tolist() == [10]
    assert len(row.mask) == len(row.logprobs) == 1


def test_fully_trained_sequence_keeps_prompt_token():
    row = rows(make_group(0, 1, masks=[[7, 8, 10, 9], [7, 8, 11, 9]]))[0]
    assert row.prompt_ids.tolist() == [7]
    assert row.completion_ids.tolist() == [8, 10, 9]
    assert row.mask.all()


def test_empty_lists_and_null_both_mean_absent():
    group = recorded("no_logprobs")[0]
    assert group["advantages"] == [] and group["inference_logprobs"] is None
    row = rows(group)[0]
    assert row.token_advantages is None
    assert all(is_unknown(row.logprobs))


@pytest.mark.parametrize("value", [1.0, math.nan, -math.inf, math.inf, None])
def test_impossible_logprob_is_unknown(value):
    row = rows(
        make_group(0, 1, inference_logprobs=[[1.0, 1.0, -0.5, value], [1.0, 1.0, -0.5, -0.1]])
    )[0]
    assert row.logprobs[0] == -0.5
    assert math.isnan(row.logprobs[1])


def test_logprobs_of_context_tokens_are_ignored():
    row = rows(
        make_group(
            0, 1, masks=[[-100, 8, -100, 9]] * 2, inference_logprobs=[[-0.1, -0.2, -0.3, -0.4]] * 2
        )
    )[0]
    assert is_unknown(row.logprobs) == [False, True, False]


def test_unknown_keys_are_ignored():
    assert len(rows(make_group(0, 1, something_new={"a": 1}))) == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"masks": [[-100, -100, 10, 9], [-100, -100, 11]]},
            r"masks\[1\] has 3 entries for 4 tokens",
        ),
        (
            {"masks": [[-100, -100, 10, 9], [-100, -100, 12, 9]]},
            r"masks\[1\]\[2\] is 12, neither -100 nor",
        ),
        ({"masks": [[-100, -100, 10, 9]]}, "masks has 1 entries for 2 rollouts"),
        (
            {"inference_logprobs": [[1.0, -0.5], [1.0, -0.5]]},
            r"inference_logprobs\[0\] has 2 entries for 4",
        ),
        ({"advantages": [[0.0, 0.0, 1.0, 1.0], [0.0]]}, r"advantages\[1\] has 1 entries for 4"),
        (
            {"advantages": [[0.0, 0.0, 1.0, math.nan], [0.0] * 4]},
            r"advantages\[0\]\[3\] is nan, not a finite number",
        ),
        ({"scores": [0.0, math.nan]}, r"scores\[1\] is nan, not a finite number"),
        (
            {"scores": [0.0, 3e38]},
            r"scores\[1\] is 3e\+38, not a finite number of at most 1\.1e\+12, .* overflow",
        ),
        (
            {"advantages": [[0.0, 0.0, -1e13, 1.0], [0.0] * 4]},
            r"advantages\[0\]\[2\] is -10+\.0, not a finite number",
        ),
        ({"scores": [0.0]}, "scores has 1 entries for 2"),
        (
            {"tokens": [[7, 8, -1, 9], [7, 8, 11, 9]]},
            r"tokens\[0\]\[2\] is -1: expected `int` >= 0",
        ),
        (
            {"tokens": [[7, 8, 2**31, 9], [7, 8, 11, 9]]},
            r"tokens\[0\]\[2\] is 2147483648: expected `int` <= 2",
        ),
        ({"tokens": []}, "tokens is empty: .*at least 1"),
        ({"overrides": [{}]}, "overrides has 1 entries for 2"),
    ],
)
def test_bad_group_is_rejected_with_reason(fields, reason):
    with pytest.raises(RejectedGroup, match=reason):
        rows(make_group(0, 1, **fields))


def test_dropped_row_counts_in_group_statistics():
    group = make_group(0, 1, 5)
    group["masks"][2] = [-100] * 4
    kept = rows(group)
    assert len(kept) == 2
    assert kept[0].group_mean == 2.0


def test_sequence_over_maximum_length_is_dropped():
    assert len(rows(make_group(0, 1), max_sequence_length=4)) == 2
    assert rows(make_group(0, 1), max_sequence_length=3) == []


def test_lone_trained_first_token_drops_sequence():
    assert len(rows(make_group(0, 1, masks=[[7, -100, -100, -100], [-100, -100, 11, 9]]))) == 1


def test_single_row_group_is_refused_with_fix():
    with pytest.raises(RejectedGroup, match="a group of 1 rollout") as refusal:
        rows(make_group(1))
    assert re.search(r"single_row_groups` to 'raw' .* or 'zero'", refusal.value.fix)


def test_single_row_group_needs_nonempty_advantages():
    with pytest.raises(RejectedGroup, match="a group of 1 rollout"):
        rows(make_group(1, advantages=[[]]))


def test_single_row_group_may_bring_own_advantages():
    assert rows(make_group(1, advantages=[[0.0, 0.0, 0.5, 0.25]]))[0].token_advantages.tolist() == [
        0.5,
        0.25,
    ]


def test_set_advantage_to_zero_marks_only_its_row():
    group = make_group(0, 1, overrides=[{}, {"set_advantage_to_zero": True}])
    assert [row.zero_advantage for row in rows(group)] == [False, True]


def test_token_advantages_are_cut_like_completion():
    row = rows(make_group(0, 1, advantages=[[0.0, 0.0, 0.5, -0.5], [0.0, 0.0, 1.5, 2.5]]))[1]
    assert row.token_advantages.tolist() == [1.5, 2.5]


def test_other_temperature_is_refused_naming_both():
    with pytest.raises(RejectedGroup, match=r"temperature 0\.7, .* temperature 1\.0$") as refusal:
        rows(make_group(0, 1, generation_params={"temperature": 0.7, "max_tokens": 16}))
    assert "Set `temperature: 0.7`" in refusal.value.fix


@pytest.mark.parametrize(
    "fields", [{"group_overrides": {"temperature": 0.7}}, {"overrides": [{}, {"temperature": 0.7}]}]
)
def test_other_temperature_in_override_is_refused(fields):
    with pytest.raises(
        RejectedGroup, match=r"temperature 0\.7 \(an override\), .* temperature 1\.0"
    ):
        rows(make_group(0, 1, **fields))
    assert len(rows(make_group(0, 1, **fields), temperature=0.7)) == 2


def test_trainers_temperature_is_accepted():
    assert len(rows(make_group(0, 1, generation_params={"temperature": 0.7}), temperature=0.7)) == 2


def test_images_are_refused():
    with pytest.raises(RejectedGroup, match="images"):
        rows(make_group(0, 1, images=[None, ["aGk="]]))


def test_empty_image_list_is_accepted():
    assert len(rows(make_group(0, 1, images=[None, []]))) == 2


def test_placeholder_tokens_are_refused():
    tokens = [list(range(128))] * 2
    masks = [[-100, *range(1, 128)]] * 2
    with pytest.raises(RejectedGroup, match="placeholder tokens") as refusal:
        rows(
            make_group(0, 1, tokens=tokens, masks=masks, inference_logprobs=None),
            max_sequence_length=128,
        )
    assert "--openai.server_type vllm" in refusal.value.fix


PLACEHOLDERS = {
    "tokens": [[0, 1, 2, 3]] * 2,
    "masks": [[-100, 1, 2, 3]] * 2,
    "inference_logprobs": None,
}
SPOILT = {
    "images": make_group(0, 1, images=["aGk="]),
    "placeholder tokens": make_group(0, 1, **PLACEHOLDERS),
    "unknown tokens": make_group(
        0, 1, tokens=[[7, 8, 11, 99]] * 2, masks=[[-100, -100, 11, 99]] * 2
    ),
    "temperature": make_group(0, 1, generation_params={"temperature": 0.7}),
    "one rollout": make_group(1),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_spoilt_group_is_dropped_majority_ends_run(kind, caplog):
    good, spoilt = parse_group(make_group(0, 1)), parse_group(SPOILT[kind])
    intake = Intake(64, 1.0, "refuse", vocab_size=50)
    # half of them are no majority
    assert len(intake.admit([spoilt, *[good] * 8, *[spoilt] * 7])) == 16
    assert intake.total_dropped["rejected"] == 8 * len(SPOILT[kind]["tokens"])
    assert caplog.text.count("Dropped a group that cannot be trained on") == 1
    told = r"Of the last 17 groups of environment \S+, 9 cannot be trained on: "
    with pytest.raises(RolloutError, match=told) as end:
        intake.admit([spoilt])
    assert end.value.fix
    with pytest.raises(RolloutError, match="Of the last 8 groups"):
        Intake(64, 1.0, "refuse", vocab_size=50).admit([spoilt] * 8)


def test_accidentally_spoilt_groups_never_end_run():
    malformed = RejectedGroup("torn")
    assert Intake(64, 1.0, "refuse").admit([malformed] * 40) == []


@pytest.mark.parametrize(
    "fields", [{"group_overrides": {"sft": True}}, {"overrides": [{"sft": True}] * 2}]
)
def test_supervised_rows_lack_logprobs_and_advantages(fields):
    for row in rows(make_group(0, 1, advantages=[[0.0, 0.0, 1.0, 1.0]] * 2, **fields)):
        assert row.sft and row.token_advantages is None
        assert all(is_unknown(row.logprobs))


def test_supervision_may_cover_one_row_of_group():
    assert [
        row.sft for row in rows(make_group(0, 1, overrides=[{"sft": False}, {"sft": True}]))
    ] == [False, True]


def test_single_row_group_may_be_supervised():
    assert rows(make_group(1, group_overrides={"sft": True}))[0].sft


def test_teacher_tokens_are_cut_and_padded():
    ids, logprobs = [[], [4], [1, 2], [3]], [[], [-4.0], [-1.0, -2.0], [-3.0]]
    row = rows(make_group(0, 1, distill_token_ids=[ids, []], distill_logprobs=[logprobs, None]))[0]
    assert row.distill_ids.tolist() == [[1, 2], [3, -1]]
    assert row.distill_logprobs.tolist()[0] == [-1.0, -2.0]
    assert row.distill_logprobs[1, 0] == -3.0 and np.isnan(row.distill_logprobs[1, 1])


def test_sequence_unseen_by_teacher_is_not_distilled():
    ids, logprobs = [[], [4], [], []], [[], [-4.0], [], []]
    for row in rows(make_group(0, 1, distill_token_ids=[ids, []], distill_logprobs=[logprobs, []])):
        assert row.distill_ids is None and row.distill_logprobs is None


@pytest.mark.parametrize("value", [0.5, None, math.nan, -math.inf])
def test_impossible_teacher_logprob_drops_its_token(value):
    ids, logprobs = [[], [4], [1, 2], [3]], [[], [-4.0], [-1.0, value], [-3.0]]
    row = rows(
        make_group(0, 1, distill_token_ids=[ids, ids], distill_logprobs=[logprobs, logprobs])
    )[0]
    assert row.distill_ids.tolist() == [[1, -1], [3, -1]]
    assert is_unknown(row.distill_logprobs) == [[False, True], [False, True]]


IDS, LOGPROBS = [[[], [4], [1, 2], [3]]] * 2, [[[], [-4.0], [-1.0, -2.0], [-3.0]]] * 2


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [
        (IDS, None, "distill_token_ids came without distill_logprobs"),
        ([], LOGPROBS, "distill_logprobs came without distill_token_ids"),
        (IDS[:1], LOGPROBS, "distill_token_ids has 1 entries for 2 rollouts"),
        ([IDS[0], IDS[0][1:]], LOGPROBS, r"distill_token_ids\[1\] has 3 entries for 4 tokens"),
        (
            [IDS[0], [[], [4], [1], [3]]],
            LOGPROBS,
            r"distill_logprobs\[1\]\[2\] has 2 entries for 1 token ids",
        ),
        (
            [IDS[0], [[], [4], [1, 2.0], [3]]],
            LOGPROBS,
            r"distill_token_ids\[1\]\[2\]\[1\] is 2\.0: expected",
        ),
        (
            [IDS[0], [[], [4], [1, [2]], [3]]],
            LOGPROBS,
            r"distill_token_ids\[1\]\[2\]\[1\] is \[2\]: ",
        ),
        (
            [IDS[0], [[], 4, [1, 2], [3]]],
            LOGPROBS,
            r"distill_token_ids\[1\]\[1\] is 4: expected .*array",
        ),
        (
            IDS,
            [LOGPROBS[0], [[], [-4.0], [-1.0, "-2"], [-3.0]]],
            r"distill_logprobs\[1\]\[2\]\[1\] is '-2': expect",
        ),
    ],
)
def test_misfit_of_teacher_is_rejected_with_place(ids, logprobs, reason):
    with pytest.raises(RejectedGroup, match=reason):
        rows(make_group(0, 1, distill_token_ids=ids, distill_logprobs=logprobs))


def test_unknown_teacher_token_is_refused():
    group = make_group(0, 1, distill_token_ids=IDS, distill_logprobs=LOGPROBS)
    group["distill_token_ids"] = [[[], [300], [1, 2], [3]]] * 2
    with pytest.raises(RejectedGroup, match="token id 300, and the model knows 256"):
        Intake(64, 1.0, "refuse", vocab_size=256).rollouts_of(parse_group(group), "0")


def test_messages_are_kept_as_json():
    messages = [[{"role": "user", "content": "naïve [1] \u2713"}], []]
    first, second = rows(make_group(0, 1, messages=messages))
    assert json.loads(first.messages) == messages[0]
    assert second.messages is None


def test_overlong_messages_lose_end_and_say_so():
    messages = [{"role": "user", "content": str(i) + "✓" * 10_000} for i in range(5)]
    row = rows(make_group(0, 1, messages=[messages, messages]))[0]
    assert len(row.messages.encode()) <= 64 * 1024
    kept = json.loads(row.messages)
    assert kept[:-1] == messages[:2]
    assert kept[-1] == {"role": "note", "content": "3 more messages; 150170 bytes in all"}


@pytest.mark.parametrize("messages", ["text", [], [[]], {"role": "user"}, [None, 5, {}]])
def test_odd_shaped_messages_cost_no_row(messages):
    assert len(rows(make_group(0, 1, messages=messages))) == 2


@pytest.mark.parametrize(
    ("name", "sequence", "reason"),
    [
        ("tokens", [7, True, 10, 9], r"tokens\[0\]\[1\] is True: expected `"),
        ("tokens", [7, 8.0, 10, 9], r"tokens\[0\]\[1\] is 8\.0: expected `"),
        ("tokens", [7, "8", 10, 9], r"tokens\[0\]\[1\] is '8': expected `"),
        ("tokens", [7, None, 10, 9], r"tokens\[0\]\[1\] is None: expected `"),
        ("tokens", [7, [8], 10, 9], r"tokens\[0\]\[1\] is \[8\]: expected `"),
        ("tokens", [[7], [8], [10], [9]], r"tokens\[0\]\[0\] is \[7\]: expected `"),
        ("tokens", [[], [7, 8, 10], 9, []], r"tokens\[0\]\[0\] is \[\]: expected `"),
        ("tokens", [7, 2**63, 10, 9], r"tokens\[0\]\[1\] is 9223372036854775808: expected `"),
        ("tokens", [7, 2**64, 10, 9], r"tokens\[0\]\[1\] is 18446744073709551616: expected `"),
        ("tokens", [7, 10**999, 10, 9], r"tokens\[0\]\[1\] is 10{17}\.\.\.0{19}: expected `"),
        ("tokens", {"7": 8}, r"tokens\[0\] is {'7': 8}: expected `"),
        ("tokens", None, r"tokens\[0\] is None: expected `"),
        ("masks", [-100, -100, True, 9], r"masks\[0\]\[2\] is True: expected `"),
        ("masks", [-100, -100.0, 10, 9], r"masks\[0\]\[1\] is -100\.0: expected `"),
        ("masks", [-100, -100, [10], 9], r"masks\[0\]\[2\] is \[10\]: expected `"),
        ("masks", [[-100], [-100], [10], [9]], r"masks\[0\]\[0\] is \[-100\]: expected `"),
        ("masks", [-100, -100, 10 + 2**32, 9], r"masks\[0\]\[2\] is 4294967306, neither"),
        ("masks", [-100, -100, 10 + 2**64, 9], r"masks\[0\]\[2\] is 18446744073709551626, neither"),
        (
            "inference_logprobs",
            [1.0, 1.0, "-0.5", -0.25],
            r"inference_logprobs\[0\]\[2\] is '-0\.5': expected `",
        ),
        (
            "inference_logprobs",
            [1.0, 1.0, False, -0.25],
            r"inference_logprobs\[0\]\[2\] is False: expected `",
        ),
        (
            "inference_logprobs",
            [[1.0], [1.0], [-0.5], [-0.25]],
            r"inference_logprobs\[0\]\[0\] is \[1\.0\]: ",
        ),
        ("inference_logprobs", 5, r"inference_logprobs\[0\] is 5: expected `"),
        ("advantages", [0.0, 0.0, True, 0.0], r"advantages\[0\]\[2\] is True: expected `"),
        ("advantages", [0.0, 0.0, None, 0.0], r"advantages\[0\]\[2\] is None: expected `"),
        (
            "advantages",
            [0.0, 0.0, 1e39, 0.0],
            r"advantages\[0\]\[2\] is 1e\+39, not a finite number",
        ),
        ("scores", True, r"scores\[0\] is True: expected `"),
        ("scores", "1", r"scores\[0\] is '1': expected `"),
        ("scores", [1], r"scores\[0\] is \[1\]: expected `"),
        ("scores", 10**400, r"scores\[0\] is 10{17}\.\.\.0{19}, not a finite number"),
    ],
)
def test_values_are_never_cast_or_flattened(name, sequence, reason):
    group = make_group(0, 1)
    group[name] = [sequence, group[name][1] if name in group else [0.0] * 4]
    with pytest.raises(RejectedGroup, match=reason):
        rows(group)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"overrides": [{"sft": 1}, {}]}, r"overrides\[0\]\.sft is 1: expected `"),
        (
            {"group_overrides": {"set_advantage_to_zero": "yes"}},
            r"group_overrides\.set_advantage_to_zero is 'yes': expected `",
        ),
        (
            {"generation_params": {"temperature": "1.0"}},
            r"generation_params\.temperature is '1\.0': expected `",
        ),
        ({"env_id": "0"}, r"env_id is '0': expected `"),
        ({"overrides": {"sft": True}}, r"overrides is \{'sft': True\}: expected `"),
        ({"masks": None}, "masks is None: expected `"),
        (
            {"group_overrides": {"temperature": float("nan")}},
            r"group_overrides\.temperature is nan: expected `",
        ),
        ({"scores": {}}, r"scores is \{\}: expected `"),
    ],
)
def test_setting_of_wrong_type_is_rejected(fields, reason):
    with pytest.raises(RejectedGroup, match=reason):
        rows(make_group(0, 1, **fields))


@pytest.mark.parametrize("raw", [None, 5, "text", [1], [[1]], True])
def test_non_object_group_is_rejected(raw):
    with pytest.raises(RejectedGroup, match=r"the group is .*: expected `object`"):
        admitted(raw)

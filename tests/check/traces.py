"""Traces each shape of a model once, for all tests of a file: a trace takes seconds, and is the same
for runs that differ in what it does not depend on."""

from collections.abc import Iterator

import pytest

from trl_atropos.check import memory
from trl_atropos.check.launch import Case


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    trace = memory._traced
    known = {}

    def remembered(case: Case, exact: bool) -> tuple:
        key = key_of(case, exact)
        if key not in known:
            known[key] = trace(case, exact)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_traced", remembered)
        yield


def key_of(case: Case, exact: bool) -> tuple:
    """Returns all that a trace depends on."""
    training = case.training
    return (
        case.config.to_json_string(use_diff=False),
        str(case.model_settings),
        repr(case.peft_config),
        case.dtype,
        case.autocast,
        case.plan.device,
        case.plain_attention,
        case.trains_with_masters,
        case.rollouts,
        case.length,
        case.plan.sp_size,
        case.packs,
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
        training.gradient_checkpointing,
        str(training.gradient_checkpointing_kwargs),
        training.distillation_coef > 0,
        training.compile_layers,
        case.plan.sharding,
        exact,
    )

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
    spared = {}

    def remembered(case: Case, exact: bool) -> tuple:
        key = key_of(case, exact)
        of_model = model_key(case)
        case.spared.update(spared.setdefault(of_model, {}))
        if key not in known:
            known[key] = trace(case, exact)
            spared[of_model].update(case.spared)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_traced", remembered)
        yield


def model_key(case: Case) -> tuple:
    """Returns what the layers of a model depend on."""
    return (
        case.config.to_json_string(use_diff=False),
        str(case.model_settings),
        repr(case.peft_config),
        case.dtype,
        case.autocast,
        case.plan.device,
        case.plain_attention,
        case.trains_with_masters,
        case.plan.sp_size,
        case.packs,
    )


def key_of(case: Case, exact: bool) -> tuple:
    """Returns all that a trace depends on."""
    training = case.training
    return (
        *model_key(case),
        case.rollouts,
        case.length,
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
        training.gradient_checkpointing,
        str(training.gradient_checkpointing_kwargs),
        training.distillation_coef > 0,
        training.compile_layers,
        case.plan.sharding,
        exact,
    )

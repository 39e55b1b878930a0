"""The ledger of versions and its keys, without a server."""

import json
import random

import numpy as np
import pytest

from trl_atropos.protocol import Note, SamplingSettings, VersionsReply, completion_key
from trl_atropos.server.plane import History, Ledger


def test_key_is_equal_for_lists_arrays_and_json():
    logprobs = np.float32([random.Random(0).uniform(-20, 0) for _ in range(1000)])
    tokens = list(range(1000))
    key = completion_key([1, 2], tokens, logprobs)
    assert key == completion_key(
        np.int64([1, 2]), np.int32(tokens), json.loads(json.dumps(logprobs.tolist()))
    )
    assert completion_key([1], [2], [0.0]) == completion_key([1], [2], [-0.0])


@pytest.mark.parametrize(
    "other",
    [
        ([1, 2], [3, 4], [-0.5, np.nextafter(np.float32(-0.25), np.float32(0))]),
        ([1, 2], [3, 5], [-0.5, -0.25]),
        ([2, 2], [3, 4], [-0.5, -0.25]),
        ([1], [2, 3, 4], [-0.5, -0.25]),
        ([1, 2, 3], [4], [-0.5, -0.25]),
    ],
)
def test_another_completion_has_another_key(other):
    assert completion_key([1, 2], [3, 4], [-0.5, -0.25]) != completion_key(*other)


def test_ledger_forgets_only_oldest_completions():
    ledger = Ledger(capacity=100)
    keys = [bytes([i]) * 16 for i in range(150)]
    for version, key in enumerate(keys):
        ledger.note(key, Note((version, version + 1), SamplingSettings(temperature=version)))
    expected = [Note((i, i + 1), SamplingSettings(temperature=i)) for i in range(50, 150)]
    assert ledger.find(key.hex() for key in keys) == [None] * 50 + expected
    assert ledger.keys() == [key.hex() for key in keys[50:]]


def test_equal_completions_get_older_versions():
    for spans in ([(3, 5), (4, 4)], [(4, 4), (3, 5)]):
        ledger = Ledger()
        for span in spans:
            ledger.note(b"key", Note(span, SamplingSettings()))
        assert ledger.find([b"key".hex()]) == [Note((3, 4), SamplingSettings())]


def test_recurring_key_ages_from_its_first_time():
    """Or a policy that has become deterministic would be as old as the first time that it was, for
    ever."""
    ledger = Ledger(capacity=10)
    for version in range(30):
        note = Note((version, version), SamplingSettings())
        ledger.note(b"always", note)
        (found,) = ledger.find([b"always".hex()])
        assert found.span[0] > version - 10
        ledger.note(b"%d" % version, note)


def test_ledger_notes_survive_json():
    hot = SamplingSettings(temperature=1.5, top_k=3)
    notes = [Note((0, 0), hot), None, Note((0, 2), SamplingSettings()), Note((3, 3), hot)]
    reply = VersionsReply.of(notes)
    assert len(reply.settings) == 2
    assert VersionsReply.model_validate_json(reply.model_dump_json()).notes() == notes


def test_version_is_of_model_or_adapter_at_its_time():
    history = History()
    for version, adapter in [(1, None), (2, 7), (5, 8), (6, 7), (1, None)]:
        history.publish(version, adapter)
    assert [history.version(publishes, None) for publishes in range(6)] == [0, 1, 1, 1, 1, 1]
    # its place was overwritten
    assert [history.version(publishes, 7) for publishes in range(2, 6)] == [2, 2, 6, 6]
    assert history.version(5, 8) == 5
    assert history.version(5, 9) is None  # never published

"""Sampled ids take the place of those that a tokenizer makes of an answer's text, on a tokenizer
with merges, and on a real server whose model samples what no tokenizer would write."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.server.sessions import COMPLETIONS, TOLERANCE, Client, paths, worst_difference
from tests.server_process import Server, make_tiny_model, running_server
from trl_atropos.server.session_reuse import with_sampled_ids
from trl_atropos.server.token_tree import TokenTree

END = "<|end|>"
# In the byte-level alphabet, G with a dot is a space, and the last pair is the letter e acute.
MERGES = [("a", "b"), ("ab", "a"), ("b", "b"), ("\u0120", "a"), ("\u00c3", "\u00a9")]


def tokenizer_with_merges() -> Tokenizer:
    """Of 258 tokens, as many as the quickstart's model has: merged ones in place of rare bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    used = {piece for pair in MERGES for piece in pair}
    rare = [piece for piece in alphabet if not piece.isascii() and piece not in used]
    merged = ["".join(pair) for pair in MERGES]
    replaced = dict(zip(rare[: len(merged)], merged, strict=True))
    pieces = [replaced.get(piece, piece) for piece in alphabet]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", END])
    return tokenizer


TOKENIZER = tokenizer_with_merges()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def decode(tokens) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


def bytes_of(text: str) -> list[int]:
    """One token for each byte."""
    (splits,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return [TOKENIZER.token_to_id(piece) for piece in splits[0]]


def reused(tree: TokenTree, prompt: list[int]) -> tuple[list[int], int]:
    tokens, changed = with_sampled_ids(tree, np.array(prompt, np.int32), decode)
    return tokens.tolist(), changed


def tree_of(*completions: tuple[list[int], list[int]]) -> TokenTree:
    tree = TokenTree()
    for prompt, sampled in completions:
        tree.add(prompt, sampled, [0.0] * len(sampled), [(0, 0, len(sampled))])
    return tree


@settings(max_examples=200, deadline=None)
@given(
    st.text("abé xy", min_size=1, max_size=12),
    st.sampled_from(["", END]),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_answer_gets_its_sampled_ids_however_it_was_sampled(text, end, joins):
    """Of bytes, some of which were sampled as a merged token."""
    sampled: list[int] = []
    for token, is_joined in zip(bytes_of(text), joins, strict=False):
        pair = sampled and TOKENIZER.id_to_token(sampled[-1]) + TOKENIZER.id_to_token(token)
        merged = TOKENIZER.token_to_id(pair) if pair else None
        if is_joined and merged is not None:
            sampled[-1] = merged
        else:
            sampled.append(token)
    sampled += ids(end)
    seen = ids("u:Hi.a:")
    behind = ids(f"{'' if end else END}u:ab.a:")
    rendered = seen + ids(text + end) + behind
    tokens, changed = reused(tree_of((seen, sampled)), rendered)
    assert tokens == seen + sampled + behind
    assert changed == (tokens != rendered)


def test_every_earlier_answer_gets_its_sampled_ids():
    first = ids("u:Hi.a:")
    answer = bytes_of("abab") + ids(END)
    second = first + answer + ids("u:Go on.a:")
    other = bytes_of("bba")
    tree = tree_of((first, answer), (second, other))
    rendered = ids(f"u:Hi.a:abab{END}u:Go on.a:bba{END}u:x.a:")
    expected = second + other + ids(f"{END}u:x.a:")
    assert reused(tree, rendered) == (expected, 2)
    assert reused(tree, expected) == (expected, 0)


SEEN = ids("u:Hi.a:")


@pytest.mark.parametrize(
    ("sampled", "rendered"),
    [
        pytest.param(bytes_of("ab"), ids("abx"), id="begins with it, at a boundary"),
        pytest.param(bytes_of("xab"), ids("xaba"), id="no boundary behind it"),
        pytest.param(bytes_of("abab"), ids(f"ab{END}"), id="shortened"),
        pytest.param(bytes_of("ab "), ids(f"ab{END}"), id="trimmed"),
        pytest.param([*bytes_of("é")[:1], *bytes_of("ab")], ids("\ufffdab"), id="no UTF-8"),
        pytest.param(ids(END), ids("u:x"), id="another text"),
    ],
)
def test_answer_with_another_text_stays_as_it_is(request, sampled, rendered):
    tokens, changed = reused(tree_of((SEEN, sampled)), SEEN + rendered)
    if request.node.callspec.id.startswith("begins"):
        assert (tokens, changed) == (SEEN + sampled + ids("x"), 1)
    else:
        assert (tokens, changed) == (SEEN + rendered, 0)


def test_prompt_that_continues_a_path_keeps_it():
    """Another completion of the same call has the same text."""
    tree = tree_of((SEEN, bytes_of("abab")), (SEEN, ids("abab")))
    prompt = SEEN + ids(f"abab{END}")
    assert reused(tree, prompt) == (prompt, 0)


def test_of_two_answers_the_longer_one_counts_and_then_the_later_one():
    short = bytes_of("ab")
    long = [*bytes_of("ab"), *ids("ab")]
    later = [*ids("ab"), *bytes_of("ab")]
    prompt = SEEN + ids(f"abab{END}")
    assert prompt[len(SEEN) :] not in (long, later)
    tree = tree_of((SEEN, short), (SEEN, long), (SEEN, later), (SEEN, short))
    assert reused(tree, prompt) == (SEEN + later + ids(END), 1)


# --------------------------------------------------------------------------------- on a real server


@pytest.fixture(scope="module")
def merging_server(tmp_path_factory) -> Iterator[Server]:
    """A server whose tokenizer joins what its model samples byte by byte."""
    folder = tmp_path_factory.mktemp("merging")
    model = make_tiny_model(folder / "model")
    template = AutoTokenizer.from_pretrained(model).chat_template
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, pad_token="<|pad|>", eos_token=END
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    with running_server(model, folder / "logs") as server:
        yield server


TURNS = 3
# The model samples these bytes one by one. In the last turn, it samples from all tokens.
FIELDS = [{"allowed_token_ids": bytes_of("ab")}] * (TURNS - 1) + [{}]


def converse_by_chat(client: Client) -> None:
    chat = openai.OpenAI(base_url=client.opened["openai"], api_key="any")
    messages = []
    for fields in FIELDS:
        messages.append({"role": "user", "content": "q"})
        reply = chat.chat.completions.create(
            model="any", messages=messages, max_tokens=12, extra_body=fields
        )
        content = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": content})


def converse_by_text(client: Client) -> None:
    text = "q"
    for fields in FIELDS:
        reply = client.post(COMPLETIONS, prompt=text, max_tokens=12, **fields).json()
        text += reply["choices"][0]["text"] + "z"


@pytest.mark.server
@pytest.mark.parametrize("converse", [converse_by_chat, converse_by_text])
def test_turns_continue_the_path_of_what_was_sampled(merging_server, converse):
    plain = Client(merging_server)
    reusing = Client(merging_server, reuse=True)
    for client in (plain, reusing):
        converse(client)
    left, continued = plain.delete(), reusing.delete()
    assert [segment.parent for segment in left.segments[1:]] == [0, 1]
    assert left.segments[1].at < len(left.segments[0].tokens)
    assert "reused" not in left.counts
    lengths = [len(path) for path in paths(continued)]
    places = [(segment.parent, segment.at) for segment in continued.segments]
    assert places == [(-1, 0), (0, lengths[0]), (1, lengths[1])]
    assert continued.counts["reused"] == 1 + 2  # the third turn has two earlier answers
    model = AutoModelForCausalLM.from_pretrained(merging_server.model, dtype=torch.float32)
    assert worst_difference(model, continued, only=2) < TOLERANCE

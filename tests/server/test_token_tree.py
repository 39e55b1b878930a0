"""The tree of what a session saw and sampled, against a model that compares whole sequences."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_atropos.server.token_tree import NO_PARENT, TokenTree

# Few different tokens, so that prompts begin alike and completions repeat.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
# A call's prompt: the path of an earlier completion, cut to a share of it, and tokens behind it.
PROMPTS = st.tuples(st.integers(0, 30), st.floats(0, 1), st.lists(st.integers(0, 2), max_size=4))
CALLS = st.lists(st.tuples(PROMPTS, TOKENS), min_size=1, max_size=25)


def common(first: list[int], second: list[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


class Naive:
    """Keeps the whole sequence of each completion."""

    def __init__(self) -> None:
        self.completions: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def prompt_of(self, recipe) -> list[int]:
        number, share, behind = recipe
        before: list[int] = []
        if self.completions:
            path = self.completions[number % len(self.completions)]
            # whole in half of the cases, as an agent continues what it got
            before = path if share > 0.5 else path[: round(share * len(path))]
        return (before + behind) or [0]

    def shared(self, prompt: list[int]) -> int:
        """How many tokens of a prompt the tree has, if it continues whole paths first."""
        whole = 0
        for path in self.completions:
            if common(path, prompt) == len(path):
                whole = max(whole, len(path))
        candidates = [path for path in self.completions if common(path, prompt) >= whole]
        return max((common(path, prompt) for path in candidates), default=0)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_tree_keeps_each_sampled_token_once_on_its_path(calls):
    tree = TokenTree()
    naive = Naive()
    for number, (recipe, sampled) in enumerate(calls):
        prompt = naive.prompt_of(recipe)
        longest = naive.shared(prompt)
        logprobs = np.float32(np.arange(len(sampled)) / -7).tolist()
        assert tree.add(prompt, sampled, logprobs, [(number, 0, len(sampled))]) == number
        naive.prompts.append(prompt)
        naive.completions.append(prompt + sampled)
        segment = tree.segments[number]
        assert segment.at <= longest
        # no token of the prompt is kept again that the longest whole path has
        whole = [len(path) for path in naive.completions[:-1] if common(path, prompt) == len(path)]
        assert segment.at >= max(whole, default=0)
        if not whole:
            assert segment.at == longest
    for number, completion in enumerate(naive.completions):
        segment = tree.segments[number]
        assert tree.path(number).tolist() == completion
        assert segment.at + segment.begin == len(naive.prompts[number])
        assert segment.versions == [(number, segment.begin, len(segment.tokens))]
        assert len(segment.logprobs) == len(segment.tokens) - segment.begin
        if segment.parent != NO_PARENT:
            assert segment.parent < number
            parent = tree.segments[segment.parent]
            assert parent.at < segment.at <= parent.end
    sampled_tokens = sum(len(sampled) for _, sampled in calls)
    assert sum(len(segment.logprobs) for segment in tree.segments) == sampled_tokens
    assert tree.num_tokens == sum(len(segment.tokens) for segment in tree.segments)
    again = TokenTree.from_json(json.loads(json.dumps(tree.as_json())))
    assert again.as_json() == tree.as_json()
    for prompt in naive.prompts:
        ids = np.array(prompt, dtype=np.int32)
        assert again.find(ids) == tree.find(ids)


def tree_of(*calls: tuple[str, str]) -> TokenTree:
    """A tree of calls, each of which saw and sampled letters."""
    tree = TokenTree()
    for prompt, sampled in calls:
        ids = [ord(letter) for letter in sampled]
        tree.add([ord(letter) for letter in prompt], ids, [-1.0] * len(ids), [])
    return tree


def places(tree: TokenTree) -> list[tuple[int, int, str]]:
    return [(s.parent, s.at, "".join(map(chr, s.tokens))) for s in tree.segments]


def test_call_continues_or_branches_as_its_prompt_does():
    tree = tree_of(("ab", "cd"), ("abcde", "f"), ("abde", "g"), ("xy", "z"))
    assert places(tree) == [(-1, 0, "abcd"), (0, 4, "ef"), (0, 2, "deg"), (-1, 0, "xyz")]


def test_completions_of_one_prompt_are_siblings_also_if_they_begin_alike():
    tree = tree_of(("ab", "cd"), ("ab", "ce"), ("ab", "cd"))
    assert places(tree) == [(-1, 0, "abcd"), (0, 2, "ce"), (0, 2, "cd")]


def test_branch_leaves_the_segment_that_has_its_last_common_token():
    """The third call shares a token with the second only, which shares two with the first."""
    tree = tree_of(("ab", "cd"), ("abx", "y"), ("abxq", "r"), ("ax", "s"))
    assert places(tree)[2:] == [(1, 3, "qr"), (0, 1, "xs")]


def test_whole_path_comes_before_longer_prefix_of_another():
    tree = tree_of(("a", "b"), ("a", "bcd"), ("abcx", "y"))
    assert places(tree)[2] == (0, 2, "cxy")


def test_repeated_path_is_continued_where_it_was_sampled_last():
    tree = tree_of(("a", "bc"), ("a", "bc"), ("abcd", "e"))
    assert places(tree)[2] == (1, 3, "de")


@settings(max_examples=150, deadline=None)
@given(CALLS, PROMPTS)
def test_prompt_leaves_the_completions_that_saw_its_beginning(calls, last):
    tree = TokenTree()
    naive = Naive()
    lengths = []  # of the prompts
    for recipe, sampled in calls:
        prompt = naive.prompt_of(recipe)
        tree.add(prompt, sampled, [0.0] * len(sampled), [(0, 0, len(sampled))])
        naive.completions.append(prompt + sampled)
        lengths.append(len(prompt))
    prompt = naive.prompt_of(last)
    whole = 0
    for path in naive.completions:
        if common(path, prompt) == len(path):
            whole = max(whole, len(path))
    expected = []
    for number, (path, seen) in enumerate(zip(naive.completions, lengths, strict=True)):
        is_left = seen <= common(path, prompt) < len(path)
        if is_left and whole <= seen < len(prompt):
            expected.append((number, seen))
    assert sorted(tree.left_by(np.array(prompt, np.int32))) == expected

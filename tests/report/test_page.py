"""`trl-atropos report` in a real browser: what a person does with the page, and that nothing complains."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, Page, find_browser
from tests.report.synthetic_run import HOSTILE, make_run
from trl_atropos.report.page import build

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium on this machine: `apt-get install chromium-headless-shell` (or chromium) to run these",
)
STEPS, LARGE = 30, 1000
READING = "document.querySelector('.token-reading').textContent"
MODES = "document.querySelector('#detail .modes').textContent"
COUNT = "document.getElementById('count').textContent"
# How long a browser takes for some text and arithmetic, in milliseconds: here and now, and where nothing else runs.
WORK = """(() => {
    const began = performance.now();
    let sum = 0;
    for (let i = 0; i < 1e7; i++) sum += JSON.stringify([i, sum % 7]).length;
    return sum > 0 ? performance.now() - began : 0;
})()"""
IDLE_WORK = 530


def texts_of(selector: str) -> str:
    return f"[...document.querySelectorAll('{selector}')].map((each) => each.textContent)"


def row(column: str) -> str:
    """Of the rows that are drawn in the list, what is in one column."""
    return texts_of(f"#list .row .{column}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser(find_browser())
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"), STEPS, name=HOSTILE)
    (folder / "report.html").write_text(build(folder)[0])
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """The report, opened wide. Fails the test if anything complained, or asked for anything else than the file."""
    page = browser.page()
    page.resize(1440, 900)
    page.open(report)
    page.evaluate("localStorage.clear()")
    yield page
    assert page.errors == []
    assert set(page.requests) == {report.as_uri()}
    page.close()


def test_curves_of_everything_that_was_logged_are_drawn_with_one_for_each_environment(page):
    titles = page.evaluate(texts_of("#charts figcaption strong"))
    assert titles[0] == "Reward"
    for part in ("Where the time went", "Completion length", "Staleness", "Trainer–sampler gap", "Publish"):
        assert any(title.startswith(part) for title in titles), part
    assert page.evaluate("document.querySelector('#charts figure').querySelectorAll('path[stroke]').length") == 2
    assert page.evaluate("document.querySelectorAll('#charts svg path').length") > 20
    assert "(51 %)" in page.evaluate("document.getElementById('charts').textContent")  # forward_backward


def test_a_curve_is_read_by_keyboard(page):
    reading = "document.querySelector('#charts figure .reading').textContent"
    assert page.evaluate(reading) == f"step {STEPS}"
    page.evaluate("document.querySelector('#charts figure .drawing svg').focus()")
    page.press("ArrowLeft", 37)
    assert page.evaluate(reading) == f"step {STEPS - 1}"


def test_rollouts_are_filtered_by_reward_environment_and_step(page):
    assert page.evaluate(COUNT) == "1984 of 1984 rollouts"
    page.fill("reward_from", "0.5")
    page.fill("reward_to", "0.6")
    scores = [float(score) for score in page.evaluate(row("reward"))]
    assert scores and all(0.5 <= score <= 0.6 for score in scores)
    page.click("#filters [type=reset]")
    page.wait_for(f"{COUNT} === '1984 of 1984 rollouts'")
    page.fill("step_from", "7")
    page.fill("step_to", "7")
    page.fill("environment", "is tools")
    assert page.evaluate(COUNT) == "32 of 1984 rollouts"
    assert set(page.evaluate(row("step"))) == {"7"}


def test_rollouts_are_sorted_by_reward(page):
    page.fill("sort", "score")
    page.fill("order", "down")
    scores = [float(score) for score in page.evaluate(row("reward"))]
    assert len(scores) > 5 and scores == sorted(scores, reverse=True)


def test_a_group_is_opened_and_its_rollouts_read_one_by_one(page):
    page.fill("view", "groups")
    assert page.evaluate(COUNT) == "248 of 248 groups"
    page.click("#list [data-row='3']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.querySelectorAll('#detail .members button').length") == 8
    assert page.evaluate("document.querySelector('#detail h3').textContent") == "Rollout 24"
    page.click("#detail .members button:nth-child(2)")
    page.wait_for("document.querySelector('#detail h3').textContent === 'Rollout 25'")
    text = page.evaluate("document.querySelector('#detail .facts').textContent")
    assert "trained, step 1" in text
    assert "null" not in page.evaluate("document.getElementById('detail').textContent")
    assert "Sampled by version0" in text


def test_turns_are_apart_and_masked_tokens_grey(page):
    page.fill("environment", "is tools")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    labels = page.evaluate(texts_of(".part .label"))
    assert [label.split(" · ")[0] for label in labels] == [
        "prompt",
        "sampled, turn 1",
        "context, not trained",
        "sampled, turn 2",
    ]
    masked = "[...document.querySelectorAll('.part.context .t, .part.prompt .t')]"
    assert page.evaluate(f"{masked}.length") > 50
    assert page.evaluate(f"{masked}.every((token) => !token.style.backgroundColor)")


def test_tokens_are_coloured_by_advantage_or_by_log_probability(page):
    page.fill("environment", "is environment 0")
    page.fill("step_from", "5")
    colors = "[...document.querySelectorAll('.part.sampled .t')].map((each) => getComputedStyle(each).backgroundColor)"
    colors = f"new Set({colors}).size"
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate(colors) == 1  # one advantage for all of them
    page.click("#detail input[value=logprob]")
    assert page.evaluate(colors) > 5
    page.click("#detail input[value=none]")
    assert page.evaluate(colors) == 1
    page.evaluate("document.querySelector('#detail .tokens').focus()")
    page.press("ArrowRight", 39)
    assert "token 1 of" in page.evaluate("document.querySelector('.token-reading').textContent")


def test_tokens_are_coloured_by_the_gap_between_trainer_and_sampler(page):
    page.fill("environment", "is environment 0")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    page.click("#detail input[value=gap]")
    colors = "[...document.querySelectorAll('.part.sampled .t')].map((each) => getComputedStyle(each).backgroundColor)"
    assert page.evaluate(f"new Set({colors}).size") > 5
    chosen = "[...document.querySelectorAll('.part.sampled .t')].findIndex((each) => each.style.backgroundColor)"
    page.evaluate(
        f"document.querySelectorAll('.part.sampled .t')[{chosen}]"
        ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert re.search(r"trainer at −\d[\d.]*, gap [+−]\d\.\d+", page.evaluate(READING))
    facts = page.evaluate("document.querySelector('#detail .facts').textContent")
    assert re.search(r"Trainer–sampler gapmean \d\.\d+, largest \d\.\d+ nats", facts)


def test_a_rollout_that_was_not_trained_has_no_gap_and_the_page_says_so(page):
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for("document.querySelector('#detail h3')?.textContent === 'Rollout 1983'")
    page.click("#detail input[value=gap]")
    assert "Not known for this rollout: it was not trained" in page.evaluate(MODES)


@pytest.mark.parametrize(("view", "sort"), [("rollouts", "gap"), ("rollouts", "gap_max"), ("groups", "gap")])
def test_rollouts_and_groups_are_sorted_by_gap_and_the_list_shows_it(page, view, sort):
    page.fill("view", view)
    page.fill("sort", sort)
    page.fill("order", "down")
    gaps = [float(gap) for gap in page.evaluate(row("more"))]
    assert len(gaps) > 5 and gaps == sorted(gaps, reverse=True) and gaps[0] > 0.05
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for_element("#detail .facts")
    assert page.evaluate(row("more"))[-1] == "–"  # not trained yet


def test_where_no_gap_is_known_the_page_says_why_and_offers_none(browser, tmp_path):
    folder = make_run(tmp_path / "run", 2)
    for path in (folder / "rollouts").glob("trainer-*"):
        path.unlink()
    (tmp_path / "report.html").write_text(build(folder)[0])
    page = browser.page()
    page.open(tmp_path / "report.html")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.querySelector('#detail input[value=gap]').disabled")
    assert "No trainer–sampler gap: the trainer's log-probabilities are not in this run's folder" in (
        page.evaluate(MODES)
    )
    assert page.evaluate("document.querySelectorAll('#filters option[value^=gap]:disabled').length") == 2
    assert page.errors == []
    page.close()


def test_the_list_is_used_by_keyboard(page):
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for("document.querySelector('#detail h3')?.textContent === 'Rollout 1983'")
    assert page.evaluate("document.querySelectorAll('#list .row').length") < 60
    assert "waiting" in page.evaluate("document.querySelector('#detail .facts').textContent")
    page.press("ArrowUp", 38)
    page.wait_for("document.querySelector('#detail h3').textContent === 'Rollout 1982'")


def test_a_character_whose_bytes_are_tokens_of_their_own_is_shown_as_one(page):
    page.fill("environment", "is environment 0")
    page.click("#list [data-row='16']")
    page.wait_for_element("#detail .tokens")
    prompt = page.evaluate("document.querySelector('.part.prompt').textContent")
    assert prompt.startswith("prompt · 24 tokensGrüße an 東京! ")


def test_hostile_text_is_shown_and_not_run(page):
    page.fill("environment", "is tools")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .messages")
    for place in (".part.context", ".messages pre", "#setting-tables"):
        assert "window.hacked = true" in page.evaluate(f"document.querySelector('{place}').textContent"), place
    assert page.evaluate("window.hacked === undefined && document.images.length === 0")


def test_the_theme_follows_the_system_until_it_is_switched(page):
    light = "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
    page.prefer("dark")
    assert not page.evaluate(light)
    page.prefer("light")
    assert page.evaluate(light)
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.getElementById('theme').textContent") == "Theme: dark"
    assert not page.evaluate(light)


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 850)
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('#charts svg').getBoundingClientRect().right") <= width


@pytest.mark.slow
def test_a_run_of_1000_steps_and_64000_rollouts_opens_at_once(browser, tmp_path):
    folder = make_run(tmp_path / "run", LARGE)
    text, told = build(folder)
    assert "1000 steps" in told and "of 64064 rollouts" in told
    (tmp_path / "report.html").write_text(text)
    shutil.rmtree(folder)  # the page needs none of it
    page = browser.page()
    before = page.evaluate(WORK)
    milliseconds = page.open(tmp_path / "report.html")
    slower = max(1.0, before / IDLE_WORK, page.evaluate(WORK) / IDLE_WORK)
    print(
        f"{len(text) / 1e6:.1f} MB, complete after {milliseconds} ms where everything takes {slower:.1f} times as long"
    )
    assert milliseconds < slower * 10_000  # two seconds where nothing else runs
    note = page.evaluate("document.getElementById('rollouts-note').textContent")
    assert note.startswith("2000 of the 64064 rollouts")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.errors == []
    page.close()

"""`trl-atropos report` in a real browser: what a person does with the page, and that nothing
complains."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, Page, find_browser
from tests.report.synthetic_run import HOSTILE, make_run
from trl_atropos.report.page import build
from trl_atropos.report.run_log import portable

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium on this machine: `apt-get install chromium-headless-shell` (or chromium) "
    "to run these",
)
STEPS, LARGE = 30, 1000
READING = "document.querySelector('.token-reading').textContent"
MODES = "document.querySelector('#detail .modes').textContent"
COUNT = "document.getElementById('count').textContent"
# How long a browser takes for some text and arithmetic, in milliseconds: here and now, and where
# nothing else runs.
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
    """The report, opened wide. Fails the test if anything complained, or asked for anything else
    than the file."""
    page = browser.page()
    page.resize(1440, 900)
    page.open(report)
    page.evaluate("localStorage.clear()")
    yield page
    assert page.errors == []
    assert set(page.requests) == {report.as_uri()}
    page.close()


def test_curves_show_each_metric_and_environment(page):
    titles = page.evaluate(texts_of("#curves .chart figcaption strong"))
    assert titles[:3] == ["Reward", "Parts of the reward", "Evaluation held_out"]
    for part in (
        "Where the time went",
        "Completion length",
        "Staleness",
        "Trainer–sampler gap",
        "Publish",
    ):
        assert any(title.startswith(part) for title in titles), part
    thin, thick = (
        "document.querySelectorAll('#progress figure:first-child "
        f'path[stroke-width="{width}"]\').length'
        for width in (1, 3)
    )
    # of each environment every batch, and a running mean
    assert page.evaluate(f"[{thin}, {thick}]") == [2, 2]
    units = page.evaluate(texts_of("#curves .chart svg text:nth-last-of-type(2)"))
    assert {"mean score", "share", "seconds per step", "tokens", "optimizer steps", "nats"} <= set(
        units
    )
    assert page.evaluate("document.querySelectorAll('#charts svg path').length") > 15
    # forward_backward
    assert "(51 %)" in page.evaluate("document.getElementById('charts').textContent")


def test_parts_of_reward_have_a_curve_each_and_stand_by_their_rollout(page):
    figures = "[...document.querySelectorAll('#progress figure')]"
    chart = f"{figures}.find((each) => each.textContent.includes('Parts of the reward'))"
    legend = page.evaluate(f"{chart}.querySelector('.legend').textContent")
    assert re.fullmatch(r"format \S+length \S+", legend.strip()), legend
    assert page.evaluate(f"{chart}.querySelectorAll('path').length") == 2
    names = page.evaluate(texts_of("#any-metric option"))
    assert "environment/tools/train/calls" in names and "reward/format" in names
    facts = "document.querySelector('#detail .facts').textContent"
    for environment, told in (("tools", True), ("environment 0", False)):
        page.fill("environment", f"is {environment}")
        page.click("#list [data-row='0']")
        page.wait_for(
            f"document.getElementById('detail').textContent.includes(', {environment}: ')"
        )
        parts = re.search(r"Parts of the rewardformat [01], length \d", page.evaluate(facts))
        assert (parts is not None) == told


def test_curve_is_read_by_keyboard(page):
    reading = "document.querySelector('#progress figure .reading').textContent"
    assert page.evaluate(reading) == f"step {STEPS}"
    page.evaluate("document.querySelector('#progress figure .drawing svg').focus()")
    page.press("ArrowLeft", 37)
    assert page.evaluate(reading) == f"step {STEPS - 1}"


def test_rollouts_filter_by_reward_environment_step(page):
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


def test_opened_group_shows_rollouts_one_by_one(page):
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


def test_tokens_are_coloured_by_advantage_or_logprob(page):
    page.fill("environment", "is environment 0")
    page.fill("step_from", "5")
    colors = (
        "[...document.querySelectorAll('.part.sampled .t')].map((each) => "
        "getComputedStyle(each).backgroundColor)"
    )
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


def test_tokens_are_coloured_by_sampler_gap(page):
    page.fill("environment", "is environment 0")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    page.click("#detail input[value=gap]")
    colors = (
        "[...document.querySelectorAll('.part.sampled .t')].map((each) => "
        "getComputedStyle(each).backgroundColor)"
    )
    assert page.evaluate(f"new Set({colors}).size") > 5
    chosen = (
        "[...document.querySelectorAll('.part.sampled .t')].findIndex((each) => "
        "each.style.backgroundColor)"
    )
    page.evaluate(
        f"document.querySelectorAll('.part.sampled .t')[{chosen}]"
        ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert re.search(r"trainer at −\d[\d.]*, gap [+−]\d\.\d+", page.evaluate(READING))
    facts = page.evaluate("document.querySelector('#detail .facts').textContent")
    assert re.search(r"Trainer–sampler gapmean \d\.\d+, largest \d\.\d+ nats", facts)


def test_untrained_rollout_has_no_gap_and_says_so(page):
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for("document.querySelector('#detail h3')?.textContent === 'Rollout 1983'")
    page.click("#detail input[value=gap]")
    assert "Not known for this rollout: it was not trained" in page.evaluate(MODES)


@pytest.mark.parametrize(
    ("view", "sort"), [("rollouts", "gap"), ("rollouts", "gap_max"), ("groups", "gap")]
)
def test_rollouts_and_groups_are_sorted_by_gap(page, view, sort):
    page.fill("view", view)
    page.fill("sort", sort)
    page.fill("order", "down")
    gaps = [float(gap) for gap in page.evaluate(row("more"))]
    assert len(gaps) > 5 and gaps == sorted(gaps, reverse=True) and gaps[0] > 0.05
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for_element("#detail .facts")
    assert page.evaluate(row("more"))[-1] == "–"  # not trained yet


def test_page_without_gaps_says_why_and_offers_none(browser, tmp_path):
    folder = make_run(tmp_path / "run", 2)
    for path in (folder / "rollouts").glob("trainer-*"):
        path.unlink()
    (tmp_path / "report.html").write_text(build(folder)[0])
    page = browser.page()
    page.open(tmp_path / "report.html")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.querySelector('#detail input[value=gap]').disabled")
    assert (
        "No trainer–sampler gap: the trainer's log-probabilities are not in this run's folder"
        in (page.evaluate(MODES))
    )
    assert (
        page.evaluate("document.querySelectorAll('#filters option[value^=gap]:disabled').length")
        == 2
    )
    assert page.errors == []
    page.close()


def test_branches_are_shown_with_parent_and_place(browser, tmp_path):
    folder = make_run(tmp_path / "run", 1, branches=True)
    (tmp_path / "report.html").write_text(build(folder)[0])
    page = browser.page()
    page.open(tmp_path / "report.html")
    page.fill("environment", "is tools")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    boxes = page.evaluate(texts_of("#detail .tokens > *"))
    assert boxes[2] == "Branch 1: leaves the first path after 1 token"
    shown = [box.split(" · ")[0] for box in boxes]
    assert shown[:2] == ["prompt", "sampled, turn 1"]
    assert shown[3:] == ["context, not trained", "sampled, turn 2"]
    assert "Branches1" in page.evaluate("document.querySelector('#detail .facts').textContent")
    assert page.errors == []
    page.close()


def test_list_is_used_by_keyboard(page):
    page.evaluate("document.getElementById('list').focus()")
    page.press("End", 35)
    page.wait_for("document.querySelector('#detail h3')?.textContent === 'Rollout 1983'")
    assert page.evaluate("document.querySelectorAll('#list .row').length") < 60
    assert "waiting" in page.evaluate("document.querySelector('#detail .facts').textContent")
    page.press("ArrowUp", 38)
    page.wait_for("document.querySelector('#detail h3').textContent === 'Rollout 1982'")


def test_multi_token_character_is_shown_as_one(page):
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
        assert "window.hacked = true" in page.evaluate(
            f"document.querySelector('{place}').textContent"
        ), place
    assert page.evaluate("window.hacked === undefined && document.images.length === 0")


def test_theme_follows_system_until_switched(page):
    light = "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
    page.prefer("dark")
    assert not page.evaluate(light)
    page.prefer("light")
    assert page.evaluate(light)
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.getElementById('theme').textContent") == "Theme: dark"
    assert not page.evaluate(light)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000])
def test_page_fits_window_and_header_hides_nothing(page, width, theme):
    page.prefer(theme)
    page.resize(width, 850)
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.evaluate("document.querySelector('#progress svg').getBoundingClientRect().right")
        <= width
    )
    box = "document.querySelector('{}').getBoundingClientRect()"
    for section in ("curves", "rollouts"):
        page.click(f"nav [href='#{section}']")
        top, header = page.evaluate(
            f"[{box.format(f'#{section}-title')}.top, {box.format('header')}.bottom]"
        )
        assert max(0, header) <= top < 450, section


def test_sessions_are_counted_by_reason(page):
    page.click("nav [href='#sessions']")
    titles = page.evaluate(texts_of("#session-tables h3"))
    assert titles == [
        "All",
        "Ended, by reason",
        "Tokens that the trainer cannot recompute, by reason",
        "Requests refused, by reason",
        "Episodes of tools, by outcome",
    ]
    tables = page.evaluate(texts_of("#session-tables table"))
    assert tables[0] == f"opened{64 * STEPS:,}calls{200 * STEPS:,}tokens sampled{10_000 * STEPS:,}"
    assert tables[1] == f"deleted{63 * STEPS:,}deadline{STEPS}"
    marked = 100 * len(range(0, STEPS, 3))
    assert tables[2] == f"temperature_0{marked:,} (0.3 % of those sampled)"
    assert tables[3] == f"calls_at_a_time{2 * STEPS}"
    assert tables[4] == f"ended{60 * STEPS:,}timeout{4 * STEPS}"
    charts = page.evaluate(texts_of("#charts figcaption strong"))
    assert any(title.startswith("Sessions") for title in charts)


def test_run_without_sessions_says_nothing_of_them(browser, tmp_path):
    page = browser.page()
    folder = make_run(tmp_path / "run", 2)
    log = folder / "run_log.jsonl"
    log.write_text(log.read_text().replace('"sessions/', '"others/'))
    (folder / "report.html").write_text(build(folder)[0])
    page.open(folder / "report.html")
    hidden = (
        "[...document.querySelectorAll('#sessions, nav [href=\"#sessions\"]')].map((e) => e.hidden)"
    )
    assert page.evaluate(hidden) == [True, True]
    assert page.errors == []
    page.close()


def test_run_is_told_at_first_glance(page):
    tiles = page.evaluate(
        "[...document.querySelectorAll('#tiles div')].map((tile) => tile.innerText.split('\\n'))"
    )
    tiles = {name: values for name, *values in tiles}
    assert (tiles["Model"], tiles["Trained on"]) == ([portable(HOSTILE)], ["CPU"])
    assert tiles["Environments"] == ["environment 0, tools"]
    assert tiles["Tokens per second, trained"] == ["5,100", "4,800 of them sampled"]
    assert tiles["Evaluation held_out, pass@1"] == [
        "0.1 → 0.7",
        "95 % interval [0.65, 0.8]; gain +0.6 [0.5, 0.7]",
    ]
    partial = (
        "95 % interval [0.344, 0.354]; gain +0.339 [0.329, 0.349]; pass@1 0 (scores above 0.9)"
    )
    assert tiles["Evaluation partial, mean score"] == ["0.01 → 0.349", partial]
    assert page.evaluate("document.getElementById('any-metric').value") == "eval_held_out_pass@1"
    page.wait_for("document.querySelectorAll('#samples figure').length === 2")
    start, end = page.evaluate(texts_of("#samples figcaption"))
    assert start.startswith("At the start step 1, reward 0.0") and end.startswith(
        f"At the end step {STEPS}, reward 0."
    )
    assert page.evaluate(texts_of("#samples .prompt"))[0].startswith("Say the first letter: ")


def test_rollouts_are_found_by_text_and_fate(page):
    page.wait_for("document.documentElement.dataset.texts === 'read'")
    page.fill("text", "GRÜSSE AN")
    assert page.evaluate(COUNT) == "0 of 1984 rollouts"
    page.fill("text", "GRÜßE AN")
    assert 0 < int(page.evaluate(COUNT).split()[0]) < 1984
    assert all("Grüße an 東京!" in said for said in page.evaluate(row("said")))
    page.fill("text", "")
    page.fill("only", "truncated")  # none of those with one turn ends with the end token
    assert page.evaluate(COUNT) == "992 of 1984 rollouts"
    page.fill("only", "no variance")
    assert page.evaluate(COUNT) == "0 of 1984 rollouts"


def test_link_opens_one_rollout(browser, report):
    page = browser.page()
    page.resize(1440, 900)
    page.open(report, "#rollout-1201")
    page.wait_for("document.querySelector('#detail h3')?.textContent === 'Rollout 1201'")
    assert (
        page.evaluate("document.querySelector('#list [aria-selected=true] .name').textContent")
        == "1201"
    )
    page.wait_for(
        "Math.abs(document.getElementById('detail').getBoundingClientRect().top - 80) < 80"
    )
    page.evaluate("window.location.hash = '#rollout-99999'")
    page.wait_for(
        "document.getElementById('detail').textContent.startsWith('Rollout 99999 is not in this "
        "page')"
    )
    assert page.errors == []
    page.close()


@pytest.mark.full
@pytest.mark.slow
def test_large_run_opens_at_once(browser, tmp_path):
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
        f"{len(text) / 1e6:.1f} MB, complete after {milliseconds} ms where everything takes "
        f"{slower:.1f} times as long"
    )
    assert milliseconds < slower * 10_000  # two seconds where nothing else runs
    note = page.evaluate("document.getElementById('rollouts-note').textContent")
    assert note.startswith("2000 of the 64064 rollouts")
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.errors == []
    page.close()

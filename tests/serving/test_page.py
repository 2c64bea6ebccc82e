"""The page: that it speaks with us alone, and, where Chromium is installed, that it works."""

import re
import shutil
from dataclasses import asdict

import httpx
import numpy as np
import pytest
from served import CANDIDATES, QUESTION, listen

from as2ray.cascade.margins import Margins
from as2ray.cascade.pruning import StagedScores
from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import DEMO_PAGE
from as2ray.serving.protocol import AskResponse


def test_page_asks_nothing_of_others(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"https?://|//[a-z]|@import|src=|<link", answer.text)


def test_page_names_only_parts_that_it_has():
    page = DEMO_PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r'\$\("([a-z-]+)"\)', page))
    assert named
    assert named <= set(re.findall(r'id="([a-z-]+)"', page))


def test_page_reads_only_what_rank_and_info_give(client):
    page = DEMO_PAGE.read_text(encoding="utf-8")
    asked = {"question": QUESTION, "candidates": CANDIDATES}
    for name, given in (
        ("result", client.post("/rank", json=asked).json()),
        ("info", client.get("/info").json()),
    ):
        read = set(re.findall(rf"\b{name}\.([a-z0-9_]+)", page))
        assert read
        assert read <= set(given) | set(AskResponse.model_fields)


def test_page_is_left_out_by_option(serve):
    assert serve(enable_demo_page=False).get("/").status_code == 404


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        pytest.skip("no chromium and chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=found[1])
    browser = webdriver.Chrome(options=options, service=service)
    browser.set_script_timeout(30)
    yield browser
    browser.quit()


def ranked(browser) -> list[tuple[str, str]]:
    """Text and layer of each candidate that the page shows, once it does."""
    from selenium.webdriver.support.ui import WebDriverWait

    items = WebDriverWait(browser, 30).until(
        lambda b: b.find_elements("css selector", "#ranking li")
    )
    return [
        tuple(one.find_element("css selector", part).text for part in ("p", ".layer"))
        for one in items
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1_200, 360])
def test_page_ranks_by_keyboard_on_wide_and_narrow_screens(browser, address, client, width):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.set_window_size(width, 800)
    browser.get(address)
    question = browser.switch_to.active_element
    assert question.get_attribute("id") == "question"
    question.clear()
    question.send_keys(QUESTION, Keys.TAB)
    candidates = browser.switch_to.active_element
    candidates.clear()
    candidates.send_keys("\n".join(CANDIDATES), Keys.CONTROL, Keys.ENTER)
    asked = {"question": QUESTION, "candidates": CANDIDATES}
    expected = client.post("/rank", json=asked).json()["ranking"]
    found = ranked(browser)
    assert [text for text, _ in found] == [one["text"] for one in expected]
    assert [layer.split()[-1] for _, layer in found] == [str(one["exit_layer"]) for one in expected]
    layers = [one["exit_layer"] for one in expected]
    share = round(100 * sum(layers) / (max(layers) * len(layers)))
    assert f"Layers run\n{share} %" in browser.find_element("id", "details").text
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )
    browser.find_element("id", "budget").send_keys("60000", Keys.ENTER)
    WebDriverWait(browser, 30).until(
        lambda b: "Budget\nkept" in b.find_element("id", "details").text
    )
    assert [text for text, _ in ranked(browser)] == [text for text, _ in found]


@pytest.mark.slow
def test_page_says_by_which_margins_candidates_were_dropped(browser, cascade, tmp_path):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    ranker = load(cascade)
    ranker.margins = Margins((0.0, 1.5), 1)
    with listen(str(save(ranker, tmp_path / "cascade"))) as address:
        browser.get(address)
        candidates = browser.find_element("id", "candidates")
        candidates.clear()
        candidates.send_keys("\n".join(CANDIDATES), Keys.CONTROL, Keys.ENTER)
        assert ranked(browser)
        details = browser.find_element("id", "details")
        assert "Margins\n0.0, 1.5 log-odds below place 1" in details.text
        assert "Drop ratios" not in details.text
        browser.execute_script("document.getElementById('drop-ratio').value = 0.3")
        browser.find_element("id", "rank").click()
        WebDriverWait(browser, 30).until(lambda _: "Drop ratios\n0.3, 0.3" in details.text)
        assert "Margins" not in details.text


@pytest.mark.slow
def test_page_says_which_candidates_no_layer_scored(browser, cascade, tmp_path):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    ranker = load(cascade)
    ranker.margins, ranker.bm25_margin = Margins((9.0, 9.0)), 0.0
    with listen(str(save(ranker, tmp_path / "cascade"))) as address:
        browser.get(address)
        for part, text in (("question", QUESTION), ("candidates", "\n".join(CANDIDATES))):
            browser.find_element("id", part).clear()
            browser.find_element("id", part).send_keys(text)
        browser.find_element("id", "rank").click()
        assert {layer for _, layer in ranked(browser)[1:]} == {"dropped before layer 1"}
        details = browser.find_element("id", "details")
        assert f"Layers run\n{round(100 / len(CANDIDATES))} %" in details.text
        browser.find_element("id", "budget").send_keys("60000", Keys.ENTER)
        WebDriverWait(browser, 30).until(lambda _: "Budget\nkept" in details.text)
        assert {layer for _, layer in ranked(browser)[1:]} == {"dropped before layer 1"}


@pytest.mark.slow
def test_page_says_for_which_candidates_there_was_no_time(browser, cascade):
    ranker = load(cascade)
    staged = StagedScores(np.float32([0.5, 1e-9, 0.0]), np.array([2, NOT_SCORED, NOT_SCORED]))
    browser.get(DEMO_PAGE.as_uri())
    browser.execute_script("document.getElementById('ranked').hidden = false")
    for activation in ("sigmoid", "identity"):
        ranker.activation = activation
        ranking = [asdict(each) for each in ranker.build_rankings([["a", "b", "c"]], staged)[0]]
        browser.execute_script("showRanking('ranking', ...arguments)", ranking, [1, 2, 3])
        layers = [layer for _, layer in ranked(browser)]
        assert layers == ["scored at layer 3", "dropped before layer 1", "not scored"]
    layer_of_answers = """
        $("budget").value = arguments[0];
        showRanking("more", [{score: 0.2, text: "a", exit_layer: 0}], [1, 2, 3]);
        return document.querySelector("#more .layer").textContent"""
    assert browser.execute_script(layer_of_answers, "") == "dropped before layer 1"
    assert browser.execute_script(layer_of_answers, "1") == "not scored"
    widths = browser.execute_script("""
        showDetails({exit_layers: [1, 3], num_scored: [0, 0], timings_ms: {}, drop_ratios: [],
            num_ranked: 2, budget_exceeded_ms: 20}, 1);
        return [...document.querySelectorAll("#stages .bar i")].map(each => each.style.width)""")
    assert widths == ["0%", "0%"]


@pytest.fixture(scope="module")
def library(cascade, tmp_path_factory):
    """Address of a service with an index."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "notes").mkdir()
    (folder / "notes" / "one.md").write_text(
        "# Notes\n\n## Of kovarin\n\nMuri lala. Kovarin ne badesso. Lala.\n\n"
        "## Of zelimut\n\nZelimut <b>lala</b>.\n"
    )
    write_index(folder / "notes", folder / "index")
    with listen(cascade, SentenceIndex.open(folder / "index")) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("width", [1_200, 360])
def test_page_with_an_index_opens_on_a_question_and_shows_answers_in_context(
    browser, library, width
):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.set_window_size(width, 800)
    browser.get(library)
    wait = WebDriverWait(browser, 30)
    examples = wait.until(lambda b: b.find_elements("css selector", "#examples button"))
    assert [button.text for button in examples] == ["Of kovarin", "Of zelimut"]
    assert not browser.find_element("id", "candidates").is_displayed()
    question = browser.switch_to.active_element
    assert question.get_attribute("id") == "question"
    question.clear()
    question.send_keys("kovarin muri lala?", Keys.ENTER)
    answer = wait.until(lambda b: b.find_elements("css selector", "#best .answer"))[0]
    body = {"question": "kovarin muri lala?"}
    expected = httpx.post(f"{library}/ask", json=body, timeout=30).json()["answers"][0]
    assert answer.text == expected["text"]
    assert browser.find_element("id", "best").text == expected["context"]
    marked = [mark.text for mark in answer.find_elements("css selector", "mark")]
    asked = {"kovarin", "muri", "lala"}
    assert marked == [w for w in re.findall(r"\w+", answer.text) if w.lower() in asked] != []
    source = browser.find_element("css selector", "#source a")
    assert source.text == f"one.md › {expected['heading']}"
    assert source.get_attribute("href") == f"{library}/documents/one.md"
    source.send_keys(Keys.ENTER)
    document = wait.until(lambda b: b.find_elements("css selector", "#document p"))
    given = httpx.get(f"{library}/documents/one.md", timeout=30).json()["paragraphs"]
    assert [paragraph.text for paragraph in document] == [each["text"] for each in given]
    assert browser.find_element("css selector", "#document mark").text == expected["text"]
    assert browser.switch_to.active_element.get_attribute("id") == "document-title"
    question.clear()
    question.send_keys("zebra", Keys.ENTER)
    wait.until(lambda b: "No good answer" in b.find_element("id", "answer-title").text)
    assert not browser.find_element("id", "document-section").is_displayed()
    examples[1].click()
    wait.until(lambda b: "No good answer" not in b.find_element("id", "answer-title").text)
    assert browser.find_element("id", "best").text
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )


@pytest.mark.slow
def test_page_without_a_model_asks_the_index_alone(browser, index):
    from selenium.webdriver.support.ui import WebDriverWait

    with listen(None, SentenceIndex.open(index)) as address:
        browser.get(address)
        WebDriverWait(browser, 30).until(lambda b: b.find_element("id", "about").text)
        assert browser.find_element("id", "about").text == "4 sentences in the index"
        assert not browser.find_element("id", "rank-tab").is_displayed()
        browser.find_element("id", "code-tab").click()
        [block] = browser.find_elements("css selector", "#code pre")
        assert f"{address}/ask" in block.text


@pytest.mark.slow
def test_page_links_to_documents_with_dots_between_the_slashes_of_their_ids(
    browser, cascade, tmp_path
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a b/../two", "text": "Kovarin ne badesso."}\n')
    write_index(rows, tmp_path / "index")
    with listen(cascade, SentenceIndex.open(tmp_path / "index")) as address:
        browser.get(address)
        url = browser.execute_script("return new URL(documentPath('a b/../two'), location).href")
        assert httpx.get(url, timeout=30).json()["document_id"] == "a b/../two"


@pytest.mark.slow
def test_page_shows_logits_in_bars_as_their_probabilities(browser):
    browser.get(DEMO_PAGE.as_uri())
    widths = browser.execute_script("""
        const score = (score, is_logit) => ({score, is_logit, text: "a", exit_layer: null});
        showRanking("ranking", [score(0, true), score(-9, true), score(0.25), score(-1)], []);
        return [...document.querySelectorAll("#ranking .bar i")].map(each => each.style.width);
    """)
    assert widths == ["50%", "0%", "25%", "0%"]


@pytest.mark.slow
def test_page_shows_code_that_asks_the_same(browser, library, client):
    import json

    from selenium.webdriver.common.keys import Keys

    browser.get(library)
    browser.find_element("id", "rank-tab").click()
    browser.find_element("id", "rank-tab").send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("id") == "code-tab"
    candidates = browser.find_element("id", "candidates")
    candidates.clear()
    candidates.send_keys("it's\nlala")
    browser.find_element("id", "rank").click()
    blocks = [block.text for block in browser.find_elements("css selector", "#code pre")]
    assert len(blocks) == 5
    body = json.loads(blocks[0].split("-d '", 1)[1][:-1].replace("'\\''", "'"))
    assert body["candidates"] == ["it's", "lala"]
    assert client.post("/rank", json=body).status_code == 200


@pytest.mark.slow
def test_page_is_dark_and_light(browser, address):
    browser.get(address)
    colour = "return getComputedStyle(document.body).backgroundColor"
    first = browser.execute_script(colour)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(colour) != first

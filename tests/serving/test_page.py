"""The page: that it speaks with us alone, and, where Chromium is installed, that it works."""

import re
import shutil

import pytest
from served import CANDIDATES, QUESTION

from as2ray.serving.app import DEMO_PAGE


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
        read = set(re.findall(rf"\b{name}\.([a-z_]+)", page))
        assert read
        assert read - {"answers", "nearest", "reason"} <= set(given)  # those are `/ask`'s


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
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )


@pytest.mark.slow
def test_page_is_dark_and_light(browser, address):
    browser.get(address)
    colour = "return getComputedStyle(document.body).backgroundColor"
    first = browser.execute_script(colour)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(colour) != first

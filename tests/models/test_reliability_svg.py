"""What a notebook shows of a calibration."""

from xml.etree import ElementTree

import numpy as np
import pytest

from as2ray.models.calibration import CalibrationResult
from as2ray.models.reliability_svg import SIZE, reliability_svg
from as2ray.tables.reliability import Abstention, Reliability

BEFORE = Reliability((0.25, 0.75), (0.5, 1.0), (1_200, 3), ece=0.25, brier=0.2)
AFTER = Reliability((0.5,), (0.4,), (10,), ece=0.1, brier=0.15)


def test_reliability_is_a_line_and_a_dot_for_each_bin():
    svg = ElementTree.fromstring(reliability_svg(BEFORE, AFTER))
    assert (svg.get("width"), svg.get("height"), svg.get("role")) == ("120", "120", "img")
    [diagonal] = svg.findall("line")
    ends = [float(diagonal.get(name)) for name in ("x1", "y1", "x2", "y2")]
    assert ends == [0, SIZE, SIZE, 0]  # from score and accuracy 0, which are at the bottom left
    lines = [(line.get("stroke"), line.get("points")) for line in svg.findall("polyline")]
    assert lines == [("gray", "30.0,60.0 90.0,0.0"), ("steelblue", "60.0,72.0")]
    dots = [
        (dot.get("fill"), dot.get("cx"), dot.get("cy"), dot.find("title").text)
        for dot in svg.findall("circle")
    ]
    assert dots == [
        ("gray", "30.0", "60.0", "score 0.25, 50% of 1,200 are answers"),
        ("gray", "90.0", "0.0", "score 0.75, 100% of 3 are answers"),
        ("steelblue", "60.0", "72.0", "score 0.50, 40% of 10 are answers"),
    ]


@pytest.fixture
def abstention():
    return Abstention(0.25, 0.75, np.array([0.25, 0.5, 1.0]), np.array([0.0, 0.5, 0.625]))


def test_result_tells_the_errors_of_each_exit_and_when_it_abstains(abstention):
    result = CalibrationResult(
        (BEFORE, AFTER), (AFTER, BEFORE), abstention, ("exit_2", "exit_4"), 30
    )
    lines = repr(result).splitlines()
    assert lines == [
        "exit_2: calibration error 0.2500 before, 0.1000 after; Brier 0.2000 and 0.1500",
        "exit_4: calibration error 0.1000 before, 0.2500 after; Brier 0.1500 and 0.2000"
        "; scores stay as they were",
        "the first answer is wrong for 62.5% of the questions; abstains below 0.2500",
    ]
    page = ElementTree.fromstring(f"<body>{result._repr_html_()}</body>")
    head, *rows = page.find("table").findall("tr")
    assert len(head.findall("th")) == 3
    cells = [[cell.text for cell in row.findall("td")][:2] for row in rows]
    assert cells == [line.split(": ", 1) for line in lines[:2]]
    gray, blue = rows[1].findall("td/svg/polyline")
    assert len(gray.get("points").split()) == 1
    assert len(blue.get("points").split()) == 2
    assert page.find("p").text == lines[2]


def test_result_of_one_stage_names_no_exit_and_tells_where_there_is_no_threshold(abstention):
    unsure = Abstention(None, 0.3, abstention.coverage, abstention.risk)
    lines = repr(CalibrationResult((BEFORE,), (BEFORE,), unsure, ("",), 30)).splitlines()
    assert lines[0].startswith("calibration error 0.2500 before, 0.2500 after; Brier 0.2000 and 0")
    assert not lines[0].endswith("were")  # equal errors
    assert lines[1].endswith("; no threshold is stored")


def test_result_tells_that_its_questions_are_few(abstention):
    result = CalibrationResult((BEFORE,), (AFTER,), abstention, ("",), 29)
    assert repr(result).endswith("; 29 questions are few: calibration and threshold are rough")

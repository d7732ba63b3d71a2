"""The frame of a report."""

from __future__ import annotations

from draftline.signal.report.report_page import page


def test_data_cannot_end_the_element_they_are_in() -> None:
    text = page("x", "", {"f": {"data": ["</script><!-- <script> &amp;"]}}, "'plotly'")
    data = text.split('id="f">')[1].split("</script>")[0]
    assert data == '{"data":["\\u003c/script\\u003e\\u003c!-- \\u003cscript\\u003e \\u0026amp;"]}'


def test_a_page_without_charts_has_no_script() -> None:
    text = page("<x>", "<p>body</p>", {}, "'plotly'")
    assert "<title>&lt;x&gt;</title>" in text
    assert "script-src 'none'" in text
    assert "<script" not in text
    assert "JavaScript" not in text

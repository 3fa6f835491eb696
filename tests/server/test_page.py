"""The playground in a real browser: both columns, the tree of every step, nothing from outside."""

import pytest
from served import serving

from browsing import requested

pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


def test_both_columns_show_one_text_and_every_step_its_tree(shipped, browser, tmp_path):
    with serving(shipped) as server:
        browser.get(server.address + "/")
        part = lambda name: browser.find_element(By.ID, name)  # noqa: E731
        waiting = WebDriverWait(browser, 60)
        waiting.until(lambda _: part("model").get_attribute("value"))
        browser.execute_script("document.getElementById('tokens').value = 40")
        part("go").click()
        waiting.until(lambda _: "as fast" in part("verdict").text)
        spec = part("spec").get_property("textContent")
        assert spec
        assert spec == part("plain").get_property("textContent")
        steps = int(part("step").get_attribute("max")) + 1
        assert f"The same text: {steps} calls of the model in place of 40" in part("verdict").text
        assert f"in {steps} calls" in part("spec-numbers").text
        assert "40 tokens in 40 calls" in part("plain-numbers").text
        for at in range(steps):
            browser.execute_script(
                "const s = document.getElementById('step'); s.value = arguments[0];"
                "s.dispatchEvent(new Event('input'))",
                at,
            )
            tree = part("tree").find_element(By.TAG_NAME, "svg")
            drafted, kept = part("said").text.split(" drafted, ")
            assert len(tree.find_elements(By.CSS_SELECTOR, ".kept, .gone")) == int(drafted)
            assert len(tree.find_elements(By.CLASS_NAME, "kept")) == int(kept.split(" kept")[0])
        rows = part("depths").find_elements(By.TAG_NAME, "tr")
        kept = sum(int(row.find_elements(By.TAG_NAME, "td")[2].text) for row in rows)
        assert 40 - steps <= kept <= 40 - steps + 4  # the budget may cut the last step
        hostile = "<script>document.title = 'gone'</script>"
        browser.execute_script(
            "write(document.getElementById('spec'), {text: arguments[0]}, null)", hostile
        )
        assert hostile in part("spec").get_property("textContent")
        assert browser.title == "outrider playground"
        browser.save_screenshot(str(tmp_path / "page.png"))
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        assert all(url.startswith(server.address) for url in requested(browser))
        browser.execute_script("document.getElementById('prompt').value = ''")
        part("go").click()
        waiting.until(lambda _: "empty" in part("error").text)
        assert part("verdict").text == ""
        assert (part("which").text, part("step").is_enabled()) == ("0 of 0", False)

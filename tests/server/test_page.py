"""The playground in a real browser: both columns, the tree of every step, nothing from outside."""

import pytest
from served import serving

from browsing import requested

pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
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


@pytest.mark.exhaustive
def test_a_queue_is_not_decoding_and_a_phone_can_read_the_tree(shipped, browser, tmp_path):
    """Ctrl-Enter submits; every kind has a sign of its own; what was waited for does not count."""
    with serving(shipped) as server:
        browser.set_window_size(500, 900)  # Chromium's least; the page is made narrower than that
        browser.get(server.address + "/")
        part = lambda name: browser.find_element(By.ID, name)  # noqa: E731
        waiting = WebDriverWait(browser, 60)
        waiting.until(lambda _: part("model").get_attribute("value"))
        browser.execute_script(
            "document.body.style.width = '358px';"
            "document.getElementById('tokens').value = 16;"
            "window.told = []; const real = events;"
            "window.events = async function* (...asked) {"
            "  for await (const chunk of real(...asked)) {"
            "    if (chunk.metrics) window.told.push(chunk.metrics.generation_time_ms);"
            "    yield chunk; } };"
        )
        part("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        waiting.until(lambda _: "as fast" in part("verdict").text)
        drafted, plain = browser.execute_script("return window.told")  # the server's own times
        rate = float(part("spec-numbers").text.split(" a call, ")[1].split(" ")[0])
        assert rate == pytest.approx(16e3 / drafted, abs=0.06)
        assert f"{plain / drafted:.2f} times as fast" in part("verdict").text
        texts = part("tree").find_elements(By.TAG_NAME, "text")
        signs = {one.get_attribute("class"): one.text[0] for one in texts}
        assert {"kept": "\u2713", "gone": "\u2717", "fixed": "\u2192", "bonus": "+"}.items() >= (
            {kind: sign for kind, sign in signs.items() if kind}.items()
        )
        box = part("tree").rect
        for one in texts:
            assert box["x"] <= one.rect["x"]
            assert one.rect["x"] + one.rect["width"] <= box["x"] + box["width"]
            assert one.rect["height"] >= 12
        style = lambda name, of: part(name).value_of_css_property(of)  # noqa: E731
        assert style("go", "background-color") != style("stop", "background-color")
        browser.save_screenshot(str(tmp_path / "narrow.png"))
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        )
        dark = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        assert dark == "rgba(22, 24, 28, 1)"
        browser.save_screenshot(str(tmp_path / "dark.png"))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.set_window_size(1280, 900)

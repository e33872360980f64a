"""Uses the page at / in headless Chromium and prints what it saw, as one line of JSON.

python page.py CHROMIUM SCENARIO ADDRESS
"""

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

PANELS = (
    *("fill-mask", "embed", "nsp", "qa", "token-classification", "redact", "text-classification"),
    *("zero-shot-classification", "score", "live"),
)
DONE = "main h3, main .error, main pre, main svg"


class Watched:
    """A page that records messages of the console, failures, and the addresses that it asks."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.messages: list[str] = []
        self.addresses: set[str] = set()
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.addresses.add(request.url.split("#")[0]))

    def open(self, address: str, panel: str) -> Page:
        self.page.goto("about:blank")
        self.page.goto(f"{address}/#{panel}")
        self.page.wait_for_selector(DONE)
        return self.page


def panels(browser: Browser, address: str) -> dict[str, Any]:
    """What each panel shows, in light and dark, on a desk and on a phone."""
    seen: dict[str, Any] = {"violations": [], "rules": 1000, "wide": [], "text": {}}
    desk = {"viewport": {"width": 1000, "height": 800}, "color_scheme": "light"}
    phone = {"viewport": {"width": 360, "height": 640}, "color_scheme": "dark", "has_touch": True}
    messages: list[str] = []
    addresses: set[str] = set()
    for options in (desk, phone):
        watched = Watched(browser, **options)
        for panel in PANELS:
            page = watched.open(address, panel)
            seen["text"][panel] = page.inner_text("main")
            found = Axe().run(page).response
            kind = options["color_scheme"]
            seen["violations"] += [
                f"{panel} {kind}: {v['id']} {v['nodes'][0]['html']}" for v in found["violations"]
            ]
            seen["rules"] = min(seen["rules"], len(found["passes"]))
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                seen["wide"].append(f"{panel} {kind}")
        messages += watched.messages
        addresses |= watched.addresses
    return seen | {"messages": messages, "addresses": sorted(addresses)}


def answers(browser: Browser, address: str) -> dict[str, Any]:
    """The answers of the panels as elements, and the code that repeats a request."""
    watched = Watched(browser, permissions=["clipboard-read", "clipboard-write"])
    seen: dict[str, Any] = {}
    page = watched.open(address, "fill-mask")
    seen["bars"] = page.locator(".bars .name").all_inner_texts()
    page.get_by_role("button", name="Copy curl").click()
    page.wait_for_selector("text=Copied")
    seen["curl"] = page.evaluate("navigator.clipboard.readText()")
    page.get_by_label("Model").select_option(index=1)
    page.get_by_label("Predictions").fill("2")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".bars li")).to_have_count(2)
    seen["curl of another model"], seen["python"] = page.locator("pre").all_inner_texts()
    page.get_by_label("Text with").fill("a [MASK] and a [MASK]")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("text=Mask 2")
    page = watched.open(address, "embed")
    seen["cosines"] = page.locator("td.heat").all_inner_texts()
    page.get_by_label("Texts to compare").fill("a\n" + "year " * 300)
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("Warning: 1 text was cut to the model's limit").wait_for()
    page = watched.open(address, "qa")
    seen["marked"] = [page.inner_text("mark")]
    seen["answers"] = page.locator("p button").all_inner_texts()
    page.locator("p button").nth(1).click()
    seen["marked"].append(page.inner_text("mark"))
    page.get_by_label("Text with").fill("\U0001f600 \U0001f600 Smith wrote the letter.")
    page.get_by_label("Question").press("Enter")
    expect(page.locator("p.text")).to_contain_text("\U0001f600")
    seen["emoji"] = [page.inner_text("mark"), page.locator("p button").first.inner_text()]
    page = watched.open(address, "score")
    seen["tokens"] = page.locator(".alarm").all_inner_texts()
    return seen | {"messages": watched.messages}


def labels(browser: Browser, address: str) -> dict[str, Any]:
    """The entities of a text, its labels, and those of another label set."""
    watched = Watched(browser)
    page = watched.open(address, "token-classification")
    seen = {"entities": page.locator("mark").all_inner_texts()}
    page = watched.open(address, "text-classification")
    names = page.locator(".bars .name")
    seen["classes"] = names.all_inner_texts()
    page.get_by_label("Label set").fill("intents")
    page.get_by_label("Labels", exact=True).fill("2")
    page.get_by_label("Text", exact=True).fill("Book a table for two at eight.")
    page.get_by_role("button", name="Ask").click()
    expect(names).to_have_count(2)
    seen["intents"], seen["code"] = names.all_inner_texts(), page.locator("pre").all_inner_texts()
    page = watched.open(address, "zero-shot-classification")
    page.get_by_label("Labels, one per line").fill("weather\npolitics")
    page.get_by_role("button", name="Ask").click()
    names = page.locator(".bars .name")
    expect(names).to_have_count(2)
    seen["own labels"] = names.all_inner_texts()
    return seen | {"messages": watched.messages}


def mistakes(browser: Browser, address: str) -> dict[str, Any]:
    """What the page says of a text without a mask, and of markup in a text."""
    watched = Watched(browser)
    page = watched.open(address, "fill-mask")
    page.get_by_label("Text with").fill("no mask here")
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector(".error")
    seen = {"alert": page.inner_text("[role=alert]")}
    page.get_by_label("Text with").fill("<img src=x onerror=alert(1)> [MASK]")
    page.get_by_role("button", name="Ask").click()
    page.get_by_role("heading", name="Answer").wait_for()
    expect(page.locator("pre").first).to_contain_text("onerror")
    return seen | {"images": page.locator("img").count(), "messages": watched.messages}


def pictures(browser: Browser, address: str) -> dict[str, Any]:
    """Two panels as PNG files in base64, for scripts/draw-page; the first answers only warm up."""
    page = Watched(browser, viewport={"width": 900, "height": 560}).page
    seen = {}
    for _ in range(2):
        for panel in ("fill-mask", "score"):
            page.goto("about:blank")
            page.goto(f"{address}/#{panel}")
            page.get_by_role("heading", name="Python").wait_for()
            seen[panel] = base64.b64encode(page.screenshot(full_page=True)).decode()
    return seen


def docs(browser: Browser, address: str) -> dict[str, Any]:
    """What "Try it out" of /docs shows for the first example of /fill-mask."""
    watched = Watched(browser)
    page = watched.page
    page.goto(f"{address}/docs")
    operation = page.locator(".opblock").filter(has=page.locator("[data-path='/fill-mask']"))
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    response = operation.locator(".live-responses-table")
    response.wait_for()
    return {
        "status": response.locator(".response-col_status").nth(1).inner_text(),
        "body": response.locator(".response-col_description .microlight").first.inner_text(),
        "messages": watched.messages,
        "addresses": sorted(watched.addresses),
    }


SCENARIOS: dict[str, Callable[[Browser, str], dict[str, Any]]] = {
    function.__name__: function for function in (panels, answers, labels, mistakes, pictures, docs)
}

if __name__ == "__main__":
    chromium, scenario, address = sys.argv[1:]
    with sync_playwright() as playwright:
        # Chromium's sandbox needs a user namespace, which containers rarely allow.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(json.dumps(SCENARIOS[scenario](browser, address)))
        browser.close()

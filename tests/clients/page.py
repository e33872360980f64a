"""Uses the page at / in headless Chromium and prints what it saw, as one line of JSON.

python page.py CHROMIUM SCENARIO ADDRESS [KEY]
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
        if options is desk:
            seen["choices"] = sets_of(watched, address)
            seen["idle"] = idle_legends(watched, address)
            seen["tabs in rows"] = in_rows(watched, "#panels a")
            seen["plots in rows"] = in_rows(watched, "main figure")
        messages += watched.messages
        addresses |= watched.addresses
    return seen | {"messages": messages, "addresses": sorted(addresses)}


def sets_of(watched: Watched, address: str) -> list[str]:
    """The label sets that the panel of classes lets choose."""
    page = watched.open(address, "text-classification")
    return page.get_by_label("Label set").locator("option").all_inner_texts()


def idle_legends(watched: Watched, address: str) -> dict[str, bool]:
    """Whether each curve is drawn, by its legend, after two scrapes without a request between."""
    page = watched.open(address, "live")
    expect(page.locator(".legend").first).to_contain_text("0.0", timeout=30_000)
    legends = page.locator(".legend span").all_inner_texts()
    curves = page.locator("figure path").evaluate_all("all => all.map((a) => a.getAttribute('d'))")
    return dict(zip(legends, map(bool, curves), strict=True))


def in_rows(watched: Watched, selector: str) -> list[int]:
    """How many of some elements each row has on a screen of 1,280 pixels."""
    watched.page.set_viewport_size({"width": 1280, "height": 800})
    tops = watched.page.locator(selector).evaluate_all("all => all.map((a) => a.offsetTop)")
    return [tops.count(top) for top in dict.fromkeys(tops)]


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


def other_models(browser: Browser, address: str) -> dict[str, Any]:
    """What panels of a model that finds entities of any labels, and of a RoBERTa, show."""
    watched = Watched(browser)
    names = ("entities", "redact", "fill-mask")
    text = {name: watched.open(address, name).inner_text("main") for name in names}
    return {"text": text, "messages": watched.messages}


def keyboard(browser: Browser, address: str) -> list[str]:
    """The names of fields and buttons that Tab reaches after Enter on a tab."""
    page = Watched(browser).open(address, "fill-mask")
    page.get_by_role("heading", name="Python").wait_for()
    page.get_by_role("link", name="Next sentence").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy Python").wait_for()
    names = []
    for _ in range(6):
        page.keyboard.press("Tab")
        names.append(
            page.locator(":focus").evaluate("e => (e.labels?.[0] ?? e).firstChild.textContent")
        )
    return names


def with_key(browser: Browser, address: str, key: str) -> dict[str, Any]:
    """What the page of a server with keys shows before, without and with the right key."""
    watched = Watched(browser, viewport={"width": 390, "height": 800})
    page = watched.page
    page.goto(address)
    field = page.get_by_label("Key of this server")
    field.wait_for()
    seen: dict[str, Any] = {"before": page.inner_text("main"), "violations": axe(page)}
    field.fill("wrong")
    page.get_by_role("button", name="Use the key").click()
    page.wait_for_function("!document.querySelector('input').value")
    seen["wrong"] = page.inner_text("[role=alert]")
    field.fill(key)
    field.press("Enter")
    page.get_by_role("heading", name="Python").wait_for()
    seen["right"] = page.inner_text("main")
    page.get_by_role("link", name="Live").click()
    status = page.locator("main > p").last
    expect(status).to_contain_text("40")
    return seen | {"live": status.inner_text(), "messages": watched.messages}


def axe(page: Page) -> list[str]:
    return [violation["id"] for violation in Axe().run(page).response["violations"]]


def api(browser: Browser, address: str) -> dict[str, Any]:
    """What the documentation of the API shows in the dark and on a phone."""
    phone = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    watched = Watched(browser, **phone)
    page = watched.page
    page.goto(f"{address}/docs")
    page.locator(".opblock-summary-control").first.click()
    page.locator(".opblock-body .responses-wrapper").wait_for()
    shade = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return {
        "background": shade,
        "servers": page.get_by_text("Servers").count(),
        "wide": page.evaluate("document.documentElement.scrollWidth > innerWidth"),
        "messages": watched.messages,
    }


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


SCENARIOS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (panels, mistakes, other_models, keyboard, with_key, api, pictures)
}

if __name__ == "__main__":
    chromium, scenario, *given = sys.argv[1:]
    with sync_playwright() as playwright:
        # Chromium's sandbox needs a user namespace, which containers rarely allow.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(json.dumps(SCENARIOS[scenario](browser, *given)))
        browser.close()

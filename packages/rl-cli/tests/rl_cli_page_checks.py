"""Checks of a page in a browser: is all text legible, every control reachable?"""

from __future__ import annotations

__all__ = ["CONTROLS", "FOCUSED", "POOR_TEXTS"]

# Numbers the visible controls; of radio buttons and tabs, one takes the focus.
CONTROLS = """(() => {
  const kinds = "a[href], button, input, select, summary, [tabindex='0']";
  window.controls = [...document.querySelectorAll(kinds)].filter(
    (e) => e.checkVisibility() && e.tabIndex >= 0 && !e.disabled &&
      (e.type !== "radio" || e.checked));
  return window.controls.map((_, number) => number);
})()"""
FOCUSED = """(() => {
  const e = document.activeElement, style = getComputedStyle(e);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  return [window.controls.indexOf(e), outlined || style.boxShadow !== "none"];
})()"""
# Composes the rendered colours behind each text (WCAG 2.2, 1.4.3).
POOR_TEXTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d");
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) =>
    [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => {
      const v = c / 255;
      return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = [];
  let checked = 0;
  const check = (e, text, part) => {
    const chain = [];
    for (let up = e; up; up = up.parentElement) chain.unshift(up);
    let ground = [255, 255, 255];
    for (const up of chain)
      ground = over(rgba(getComputedStyle(up).backgroundColor), ground);
    const style = getComputedStyle(e, part), colour = over(rgba(style.color), ground);
    const [dark, bright] = [light(colour), light(ground)].sort((x, y) => x - y);
    const ratio = (bright + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    checked += 1;
    if (ratio < (large ? 3 : 4.5))
      poor.push(`${e.tagName} ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
    if (text && e.checkVisibility() && !e.closest("script, [disabled]")) check(e, text);
  }
  for (const e of document.querySelectorAll("[placeholder]"))
    if (e.checkVisibility()) check(e, e.placeholder, "::placeholder");
  return {checked, poor: [...new Set(poor)]};
})()"""

// What is wrong with a page as it is drawn, as a list of sentences: what scrolls sideways, what is cut, what is too small.
(() => {
  const found = new Set();
  const width = document.documentElement.clientWidth;
  const SLACK = 1.5; // rounding, and italics that lean out of their boxes
  const SMALLEST = 9; // pixels of a letter's body
  const SMALLEST_OUTLINE = 4.5; // pixels of a line of letters that are drawn as paths, which have no body

  const quote = text => {
    const short = text.replace(/\s+/g, " ").trim();
    return `"${short.length > 50 ? short.slice(0, 50) + "..." : short}"`;
  };
  const seen = element => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  // Pages have thousands of texts in the same few hundred boxes.
  const remembered = of => {
    const known = new Map();
    return element => {
      if (!known.has(element)) known.set(element, of(element));
      return known.get(element);
    };
  };
  const styleOf = remembered(element => {
    const { display, position, overflowX, overflowY, whiteSpace, fontSize } = getComputedStyle(element);
    return { display, position, overflowX, overflowY, whiteSpace, fontSize };
  });
  const boxOf = remembered(element => element.getBoundingClientRect());
  const isInline = style => style.display === "inline" || style.display === "contents";
  // Drawers and menus wait beside the window, and words for screen readers in boxes of a pixel; both are meant so.
  const isAside = remembered(element => {
    if (!element || element === document.body) return false;
    if (["fixed", "absolute", "sticky"].includes(styleOf(element).position)) {
      const box = boxOf(element);
      if (box.right <= 0 || box.left >= width || box.bottom + scrollY <= 0) return true;
      if (box.width <= 1 || box.height <= 1) return true;
    }
    return isAside(element.parentElement);
  });

  const scrolls = document.scrollingElement.scrollWidth;
  if (scrolls > width + 1) {
    const wide = [...document.body.querySelectorAll("*")].filter(
      e => seen(e) && e.getBoundingClientRect().right > width + 1 && e.getBoundingClientRect().left < width);
    const which = wide.slice(-1).map(e => `, as of <${e.localName} class="${e.className.baseVal ?? e.className}">`);
    found.add(`the page scrolls sideways: ${scrolls} px in a window of ${width}${which}`);
  }

  if (!document.body.innerText.trim()) found.add("nothing is to be read");

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement;
    if (!node.data.trim() || !owner || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(owner.tagName)) continue;
    if (owner instanceof SVGElement || !seen(owner) || isAside(owner)) continue;
    const size = parseFloat(styleOf(owner).fontSize);
    if (size < SMALLEST) found.add(`letters of ${size.toFixed(1)} px: ${quote(node.data)}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    const preformatted = styleOf(owner).whiteSpace.startsWith("pre");
    for (const text of range.getClientRects()) {
      if (!text.width || !text.height) continue;
      if (text.width > width && !preformatted) found.add(`a line longer than the window: ${quote(node.data)}`);
      let inner = true; // no box around it so far
      for (let at = owner; at; at = at.parentElement) {
        const style = styleOf(at), box = boxOf(at);
        if (isInline(style)) continue;
        if (["auto", "scroll"].includes(style.overflowX)) break; // the rest can be reached
        const out = Math.max(text.right - box.right, box.left - text.left);
        const below = Math.max(text.bottom - box.bottom, box.top - text.top);
        if (style.overflowX !== "visible" && out > SLACK) found.add(`cut off: ${quote(node.data)}`);
        else if (["hidden", "clip"].includes(style.overflowY) && below > text.height / 3) {
          found.add(`cut off: ${quote(node.data)}`);
        } else if (inner && out > SLACK) found.add(`runs out of its box: ${quote(node.data)}`);
        else if (at === document.body && (text.right > width + SLACK || text.left < -SLACK)) {
          found.add(`runs out of the window: ${quote(node.data)}`);
        }
        inner = false;
      }
    }
  }

  for (const drawing of document.querySelectorAll("svg")) {
    const frame = drawing.getBoundingClientRect();
    if (!seen(drawing) || frame.width < 100 || isAside(drawing)) continue;
    const labels = [...drawing.querySelectorAll("text, g[id^='text_']")].filter(seen).map(label => ({
      box: label.getBoundingClientRect(),
      name: quote(label.textContent.trim() || label.id),
      body: label instanceof SVGTextElement
        ? parseFloat(getComputedStyle(label).fontSize) * Math.abs(label.getScreenCTM().a || label.getScreenCTM().b)
        : null,
    })).filter(label => label.box.width);
    labels.forEach((label, i) => {
      const { box, body, name } = label;
      const out = Math.max(box.right - frame.right, frame.left - box.left, box.bottom - frame.bottom, frame.top - box.top);
      if (out > SLACK) found.add(`label outside of its drawing: ${name}`);
      const line = Math.min(box.width, box.height);
      if (body === null ? line < SMALLEST_OUTLINE && box.width > 8 : body < SMALLEST - 1) {
        found.add(`letters of ${(body ?? line).toFixed(1)} px in a drawing: ${name}`);
      }
      for (const other of labels.slice(i + 1)) {
        const across = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
        const down = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
        if (across > 2 && down > 2) found.add(`labels on each other: ${name} and ${other.name}`);
      }
    });
    for (const shape of drawing.querySelectorAll("rect, circle, ellipse, line, path, polygon, polyline")) {
      if (shape.closest("defs, clipPath, symbol, [clip-path], g[id^='text_']") || !seen(shape)) continue;
      const box = shape.getBoundingClientRect();
      const out = Math.max(box.right - frame.right, frame.left - box.left, box.bottom - frame.bottom, frame.top - box.top);
      if (out > 3) found.add(`shape outside of its drawing: <${shape.localName}> by ${out.toFixed(0)} px`);
    }
  }

  for (const image of document.images) {
    if (seen(image) && image.complete && !image.naturalWidth) found.add(`picture that is not there: ${image.src}`);
  }
  return [...found];
})()

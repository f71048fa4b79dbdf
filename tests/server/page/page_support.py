"""What the test of the page needs besides: a server of the page for a server that has none yet, and what
every page must keep to."""

import http.client
import http.server
import socketserver
from pathlib import Path

CSP = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
       "connect-src 'self'; img-src data: blob:")


# ---- A server of the page, for a server that has none yet ----

class Proxy(http.server.BaseHTTPRequestHandler):
    page = None
    base = None
    protocol_version = "HTTP/1.0"  # an answer ends where its connection does

    def do_GET(self):
        if self.path.split("?")[0] not in ("/", "/llm/", "/llm"):
            return self.pass_on()
        body = Path(self.page).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.pass_on()

    def do_DELETE(self):
        self.pass_on()

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.base.hostname, self.base.port)
        headers = {k: self.headers[k] for k in ("Authorization", "Content-Type") if self.headers[k]}
        path = self.path.removeprefix("/llm") if self.path.startswith("/llm/") else self.path
        connection.request(self.command, path, body, headers)
        reply = connection.getresponse()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.getheader("Content-Type", "text/plain"))
        self.end_headers()
        try:
            while part := reply.read1(65536):
                self.wfile.write(part)
                self.wfile.flush()
        except OSError:
            pass  # the page has gone: the server sees it, too
        finally:
            connection.sock and connection.sock.close()
            connection.close()

    def log_message(self, *_):
        pass


class Threads(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


# ---- What every page must keep to ----

# Controls that overlap, texts that are cut, and things that stick out of the window.
LAYOUT = r"""() => {
  const wrong = [];
  const name = (n) => n.tagName.toLowerCase() + (n.id ? "#" + n.id : "") + " “" +
      (n.ariaLabel || n.textContent || n.placeholder || "").trim().slice(0, 30) + "”";
  if (document.documentElement.scrollWidth > innerWidth) {
    wrong.push(`the page is ${document.documentElement.scrollWidth} wide in ${innerWidth}`);
  }
  // What of a node is to be seen: less what its scrolling parents cut away.
  const seen = (n) => {
    let r = n.getBoundingClientRect();
    r = {l: r.left, t: r.top, r: r.right, b: r.bottom};
    for (let p = n.parentElement; p; p = p.parentElement) {
      if (getComputedStyle(p).position === "fixed") break;
      if (!/auto|scroll/.test(getComputedStyle(p).overflowY)) continue;
      const q = p.getBoundingClientRect();
      r = {l: Math.max(r.l, q.left), t: Math.max(r.t, q.top), r: Math.min(r.r, q.right), b: Math.min(r.b, q.bottom)};
    }
    return r;
  };
  const all = [...document.querySelectorAll(
      "button, input, select, textarea, summary, a, dt, dd, label, h1, #server, #hint, #keys, #room, .chips span, .bar, .bar + span, .wrong span, article p, article pre")]
      .filter((n) => n.checkVisibility({visibilityProperty: true}) && !n.closest(".unseen"));
  const menu = document.querySelector("nav.open");
  const boxes = all.map((n) => [n, seen(n)]).filter(([, b]) => b.r - b.l > 1 && b.b - b.t > 1);
  for (const [n, b] of boxes) {
    if (b.l < -0.5 || b.r > innerWidth + 0.5) wrong.push(`${name(n)} sticks out sideways`);
    if (b.b > innerHeight + 0.5 || b.t < -0.5) wrong.push(`${name(n)} sticks out at the top or bottom`);
    const style = getComputedStyle(n);
    if (n.scrollWidth > n.clientWidth + 1 && n.clientWidth > 0 && !/auto|scroll/.test(style.overflowX)) {
      wrong.push(`${name(n)} is cut: ${n.scrollWidth} in ${n.clientWidth}`);
    }
    const text = n.tagName === "SELECT" ? n.selectedOptions[0].text : n.value ? "" : n.placeholder;
    if (text && !(n.tagName === "TEXTAREA")) {
      const pen = document.createElement("canvas").getContext("2d");
      pen.font = style.font;
      const room = n.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - (n.tagName === "SELECT" ? 16 : 0);
      if (pen.measureText(text).width > room + 1) wrong.push(`${name(n)} cuts “${text}”: ${pen.measureText(text).width} in ${room}`);
    }
    for (const [m, c] of boxes) {
      if (m === n || m.contains(n) || n.contains(m)) continue;
      if (menu && menu.contains(m) !== menu.contains(n)) continue;  // it covers the rest
      if (all.indexOf(m) < all.indexOf(n)) continue;
      if (Math.min(b.r, c.r) - Math.max(b.l, c.l) > 1 && Math.min(b.b, c.b) - Math.max(b.t, c.t) > 1) {
        wrong.push(`${name(n)} and ${name(m)} overlap`);
      }
    }
  }
  return wrong;
}"""

# Texts whose contrast with their ground is below 4.5 (WCAG AA).
CONTRAST = r"""() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const wrong = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const n = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !n.checkVisibility() || n.closest(".unseen, script, option, :disabled")) continue;
    let ground = [255, 255, 255, 0];
    for (let p = n; p && ground[3] < 250; p = p.parentElement) ground = rgba(getComputedStyle(p).backgroundColor);
    const [a, b] = [light(rgba(getComputedStyle(n).color)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) wrong.add(`“${walk.currentNode.data.trim().slice(0, 30)}” has a contrast of ${ratio.toFixed(2)}`);
  }
  return [...wrong];
}"""

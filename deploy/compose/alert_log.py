"""Print each alert that Alertmanager sends, one line each: the receiver of the compose stack.

python alert_log.py 9094
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_BYTES = 1 << 20


def line(alert: dict[str, Any]) -> str:
    """Return an alert as one line: its state, severity and name, what it says, and where its runbook is."""
    labels, annotations = alert.get("labels", {}), alert.get("annotations", {})
    head = f"{alert.get('status', '?')} {labels.get('severity', '?')} {labels.get('alertname', '?')}"
    return " ".join(f"{head}: {annotations.get('summary', '')} {annotations.get('runbook_url', '')}".split())


class Receiver(BaseHTTPRequestHandler):
    """Alertmanager's webhook. What is no such document gets 400, and is tried again by nobody."""

    timeout = 10

    def do_POST(self) -> None:
        try:
            num_bytes = int(self.headers.get("Content-Length", "0"))
            alerts = json.loads(self.rfile.read(min(num_bytes, MOST_BYTES)))["alerts"]
            text = "".join(f"{line(alert)}\n" for alert in alerts)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.send_error(400)
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print alerts alone, no requests."""


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Receiver).serve_forever()

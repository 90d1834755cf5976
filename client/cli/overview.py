"""The answer of `octet` without a command: what is going on."""

from rich.text import Text

from octet.api_schemas import JobState
from octet.client import render
from octet.client.cli.options import connect
from octet.client.terminal import Terminal

_LIVE_SHOWN = 10
_ENDED_SHOWN = 5


def show_overview(url: str) -> None:
    """Show the pools, the alerts that fire, the jobs that live and those that ended last, and what to type next."""
    terminal = Terminal()
    with connect(url) as client:
        missing = client.why_not_ready()
        pools, alerts = list(client.pools()), client.find_alerts()
        live = client.rows(states=[state.value for state in JobState if not state.is_terminal], limit=_LIVE_SHOWN)
        ended = client.rows(states=[state.value for state in JobState if state.is_terminal], limit=_ENDED_SHOWN)
    terminal.show(Text(f"Octet at {url}", style="bold"))
    if missing is not None:
        terminal.show(Text(f"Not ready: {missing}", style="bold red"))
    terminal.show(render.pools_table(pools))
    if alerts:
        terminal.show(Text(f"\nAlerts that fire: {len(alerts)}", style="bold"))
        terminal.show(render.alert_lines(alerts))
    for title, page in (("Jobs that run or wait", live), ("Jobs that ended last", ended)):
        if page.data:
            terminal.show(Text(f"\n{title}: {len(page.data)} of {page.total}", style="bold"))
            terminal.show(render.rows_table(page.data, is_narrow=terminal.is_live))
            terminal.show(render.reasons(page.data))
    commands = ["octet submit job.yaml --watch"]
    commands += [f"octet watch {row.name}" for row in live.data[:1]] or [f"octet show {row.name}" for row in ended.data[:1]]
    commands += ["octet list", "octet --help"]
    begin = "Next" if live.total or ended.total else "No jobs yet. Next"
    terminal.show(Text("\n  ".join([f"\n{begin}:", *commands])))

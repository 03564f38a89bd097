"""An example of an MCP server: a calendar and quotes, three tools without state.

    python -m mtgrpo.tools.market          on standard input and output
    python -m mtgrpo.tools.market 8000     streamable HTTP, at http://127.0.0.1:8000/mcp

What it answers depends on the arguments alone, so that task=market knows what is right.
"""

import sys
import zlib

EVENTS = ("fair", "race", "vote", "feast", "match", "show", "sale", "trial", "dance", "walk", "game", "play")
STOCKS = ("Gold", "Corn", "Rice", "Iron", "Salt", "Wool", "Milk", "Wood", "Fish", "Oil", "Tea", "Sand")
DAYS = range(10, 90)  # of the calendar


def day_of(event: str, year: int) -> int:
    """The day of an event. One of DAYS."""
    return DAYS[zlib.crc32(f"{event} {year}".encode()) % len(DAYS)]


def open_day(day: int) -> int:
    """The next open day. This one, unless it is one of the thirds, on which the market is closed."""
    return day + (day % 3 == 0)


def price(stock: str, day: int) -> str:
    """The price of a stock. A number, or the news that there is none."""
    if stock not in STOCKS:
        return f"no stock {stock}; there are {', '.join(STOCKS)}"
    if open_day(day) != day:
        return f"closed on day {day}"
    return str(100 + zlib.crc32(f"{stock} {day}".encode()) % 900)


def serve(port: int | None) -> None:
    """Serve on standard input until it ends, or on `port` until the process is ended."""
    from mcp.server import MCPServer  # noqa: PLC0415

    app = MCPServer("market", log_level="ERROR")
    for tool in (day_of, open_day, price):
        summary = (tool.__doc__ or "").partition(".")[0]
        app.add_tool(tool, description=summary, structured_output=False)
    if port is None:
        app.run("stdio")
    else:
        app.run("streamable-http", port=port)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else None)

"""An MCP server that misbehaves when it is asked to: plain JSON-RPC, so that it starts at once."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ONE = {"type": "object", "properties": {"text": {"type": "string", "title": "Text"}}, "required": ["text"]}
NONE: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = {"echo": ONE, "secret": ONE, "fail": ONE} | {
    name: NONE for name in ("count", "hang", "die", "garbage", "large", "picture", "broken", "refuse")
}
counted = 0


def answer(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a call."""
    global counted
    if name == "hang":
        time.sleep(3600)
    if name == "die":
        os._exit(1)
    if name == "garbage":
        sys.stdout.buffer.write(b'{"jsonrpc": \xff\xfe\n')
    counted += name == "count"
    texts = {
        "echo": arguments.get("text", ""),
        "secret": os.environ.get(arguments.get("text", ""), "unset"),
        "fail": f"no {arguments.get('text')} today",
        "count": str(counted),
        "large": "x" * 10_000_000,
    }
    content = [{"type": "text", "text": texts.get(name, "")}]
    if name == "picture":
        content = [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]
    return {"content": content, "isError": name == "fail"}


def listed(cursor: str | None, manner: str) -> dict[str, Any]:
    """A page of tools; manner: what is wrong with the list."""
    tools = [{"name": name, "inputSchema": schema} for name, schema in TOOLS.items()]
    if manner == "many":
        return {"tools": [{"name": f"tool{n}", "inputSchema": NONE} for n in range(2000)]}
    if manner == "large":
        return {"tools": [{"name": "a", "description": "x" * 2**21, "inputSchema": NONE}]}
    following = {"endless": str(int(cursor or 0) + 1), "circle": str((int(cursor or 0) + 1) % 3), "again": "0"}
    return {"tools": tools} | ({"nextCursor": following[manner]} if manner in following else {})


def main() -> None:
    """Answer every request in its turn."""
    manner = sys.argv[2] if len(sys.argv) > 2 else ""
    print("ready", file=sys.stderr, flush=True)
    for number in range(200_000 if manner == "noisy" else 0):
        print(f"line {number} " + "x" * 180, file=sys.stderr)
    for line in sys.stdin:
        message = json.loads(line)
        method, asked = message.get("method"), message.get("params", {})
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
        if method == "initialize":
            info = {"name": "stubborn", "version": "1"}
            reply["result"] = {
                "protocolVersion": asked["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": info,
            }
        elif method == "tools/list":
            reply["result"] = listed(asked.get("cursor"), manner)
        elif method == "tools/call" and asked["name"] == "broken":
            reply["error"] = {"code": -32603, "message": "the database is gone"}
        elif method == "tools/call" and asked["name"] == "refuse":
            reply["error"] = {"code": -32602, "message": "not with these arguments"}
        elif method == "tools/call":
            reply["result"] = answer(asked["name"], asked.get("arguments") or {})
        else:
            reply["error"] = {"code": -32601, "message": "no such method"}
        if "id" in message:
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

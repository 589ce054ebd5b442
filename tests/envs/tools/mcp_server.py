"""A real MCP server over stdio, or over HTTP on loopback where a port is given; its tools misbehave on purpose."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("misbehaving")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def act(how: str) -> str:
    """Misbehaves."""
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how == "secrets":
        print("\x1b[2J", os.environ["SEARCH_API_KEY"], file=sys.stderr, flush=True)
        return f"{os.environ['SEARCH_API_KEY']} {os.environ['PLAIN']} {sys.argv[1:]}"
    if how == "raise":
        raise ToolError("nothing there")
    return "a\x1b[31mb\x00c\nd" if how == "control" else "x" * int(how)


@server.tool()
async def freeze() -> str:
    """Lets no one else be answered."""
    time.sleep(60)
    return ""


@server.tool()
def pid() -> str:
    """Tells the number of its process."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

"""An MCP server over stdin and stdout with the tools of the shop: pip install 'rlx[mcp]'."""

from mcp.server import MCPServer
from tools import calculate, look_up

server = MCPServer("shop", log_level="CRITICAL")
for tool in (look_up, calculate):
    server.add_tool(tool)

if __name__ == "__main__":
    server.run()

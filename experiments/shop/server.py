"""An MCP server with the tools of the shop: pip install 'rlx[mcp]'.

python server.py         over stdin and stdout
python server.py 8000    at http://127.0.0.1:8000/mcp
"""

import sys

from mcp.server import MCPServer
from tools import calculate, look_up

server = MCPServer("shop", log_level="CRITICAL")
for tool in (look_up, calculate):
    server.add_tool(tool)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

"""The live page: the runs in a folder, shown in a browser as they go on. It changes nothing.

runs.py     the runs in a folder, and what is new in them
server.py   the page's addresses, and who may ask for them
page.html   the page (page.css, page.js); the charts are plotly's
"""

from rota.ui.server import serve

__all__ = ["serve"]

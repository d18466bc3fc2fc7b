from .config import ServeConfig as ServeConfig
from .server import Server as Server, serve as serve

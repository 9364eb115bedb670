from .health import watch_plugin_health

__all__ = ["watch_plugin_health"]

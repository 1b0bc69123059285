from spurline.testing.pytest_plugin import ranks

__all__ = ["ranks"]

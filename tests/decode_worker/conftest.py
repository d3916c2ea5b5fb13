from tests.support.threads import one_thread

__all__ = ["one_thread"]  # a fixture for all modules here

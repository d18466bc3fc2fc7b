from .queue import BoundedQueue as BoundedQueue

"""Leased background loops that move jobs along: place, launch, watch, clean up."""

from service.dispatcher.dispatcher import Dispatcher

__all__ = ["Dispatcher"]

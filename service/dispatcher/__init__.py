"""Leased background loops that move jobs along: plan, place, launch, watch, release, grow, compare, orphans."""

from octet.service.dispatcher.dispatcher import Dispatcher

__all__ = ["Dispatcher"]

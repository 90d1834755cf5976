"""The error of data that does not fit its job."""


class Unfit(ValueError):
    """A source does not hold what a job needs. Names the field, what was got, what is allowed, and what to change."""

    def __init__(self, field: str, got: object, allowed: str, change: str) -> None:
        super().__init__(f"{field}: got {got}; allowed: {allowed}. {change}")
        self.field, self.got, self.allowed, self.change = field, str(got), allowed, change

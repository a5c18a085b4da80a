"""The scheduler's questions to predictor and estimator, none of which may hold it up."""

from services.scheduler.advice.face import Advice
from services.scheduler.advice.interface import Advisers, Owner

__all__ = ["Advice", "Advisers", "Owner"]

"""Every figure of the study, drawn from plain data: one module per figure, in one style."""

from incvec.study.figures.charts import color_stops, draw_chart, write_chart
from incvec.study.figures.files import find_figures, read_figure, redraw, write_figure
from incvec.study.figures.mean import mean_figure

__all__ = [
    "color_stops",
    "draw_chart",
    "find_figures",
    "mean_figure",
    "read_figure",
    "redraw",
    "write_chart",
    "write_figure",
]

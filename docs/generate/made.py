"""The marker at the top of every generated page."""

MADE = "<!-- made by `make reference`: change the code, not the page -->"

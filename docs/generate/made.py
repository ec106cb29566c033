"""What every made page says of itself."""

MADE = "<!-- made by `make reference`: change the code, not the page -->"

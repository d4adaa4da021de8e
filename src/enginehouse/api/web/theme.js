// Sets the remembered colours before anything is drawn. The only script that is no module: modules run too late.
"use strict";
const theme = localStorage.getItem("enginehouse.theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
